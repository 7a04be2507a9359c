"""The table of faults: what a server, or what stands before it, can do to a probe, and the reason that comes of it.

A fault is what `Behaviour` says of such a server. `HARMLESS` are odd answers that are right all the same.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from typing import Any

from fake_llama_answers import Model
from fake_llama_behaviour import Behaviour, Intruder, Raw, RouterModel

from exporter.roofline.reason import Reason

HTML = b"<html><head><title>Log in</title></head><body><form action=/login></form></body></html>"
PROPS: dict[str, Any] = {"total_slots": 4, "default_generation_settings": {"n_ctx": 1024}, "model_alias": "tiny"}
_ALL = ("/health", "/props", "/v1/models", "/slots", "/completion")


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        reason: What every probe of that server is counted under.
        changes: How the server differs from a healthy one.
        keys: Of the server in the configuration.
        also: Reasons that are right as well, where it depends on how the bytes happen to arrive.
    """

    reason: Reason
    changes: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    also: frozenset[Reason] = frozenset()

    def behaviour(self) -> Behaviour:
        return Behaviour(**self.changes)


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    """A whole HTTP answer, its length told."""
    head = "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers))
    return head.encode() + b"\r\n\r\n" + body


def chunked(body: bytes, *, end: bytes = b"0\r\n\r\n", size: int = 1 << 20) -> bytes:
    """The same in chunks of `size` bytes."""
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + end


def props(**more: Any) -> bytes:
    return json.dumps({**PROPS, **more}).encode()


def at(path: str, fault: Raw | str | bytes) -> dict[str, Any]:
    return {"faults": {path: Raw((fault,)) if isinstance(fault, bytes) else fault}}


def _events(*events: Any) -> bytes:
    """A stream of events, as text, to its regular end."""
    body = b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events)
    return chunked(body)


_BOMB = gzip.compress(b'{"total_slots": 4, "x": "' + b"0" * (64 << 20) + b'"}', 9)
_DEEP = b"[" * 100_000
_DENSE = b"[" + b"[]," * 1_000_000 + b"0]"
_LONG_LINE = b"data: " + b"x" * (3 << 20)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
_FLOOD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
_TOKEN = b'data: {"index": 0, "content": "a", "stop": false}\n\n'
_FINAL: dict[str, Any] = {"index": 0, "stop": True, "stop_type": "limit"}


def _timed(**values: Any) -> dict[str, Any]:
    return {"timing_values": values}


_NOT_HTTP = frozenset({Reason.NOT_LLAMA})  # where head and broken chunk arrive together

# Before a probe: the server cannot be identified.
_IDENTITY: dict[str, Case] = {
    "loading": Case(Reason.LOADING, {"loading": True}),
    "a proxy says that it loads": Case(Reason.HTTP_ERROR, at("*", answer(HTML, status="503 Service Unavailable"))),
    "wants a key": Case(Reason.UNAUTHORIZED, {"api_key": "secret"}),
    "a proxy forbids": Case(Reason.UNAUTHORIZED, at("*", answer(HTML, status="403 Forbidden"))),
    "a proxy wants a login": Case(Reason.UNAUTHORIZED, at("*", answer(HTML, status="401 Unauthorized"))),
    "the key file is gone": Case(Reason.API_KEY_UNREADABLE, {}, {"api_key_file": "/nowhere/key"}),
    "no such path": Case(Reason.NOT_LLAMA, at("*", "404")),
    "a login page": Case(Reason.NOT_LLAMA, at("*", "html_ok")),
    "a bad gateway": Case(Reason.HTTP_ERROR, at("*", "html")),
    "an alert of TLS": Case(Reason.TLS_FAILED, at("*", b"\x15\x03\x01\x00\x02\x02\x46")),
    "a proxy wants TLS": Case(
        Reason.TLS_FAILED, at("*", answer(b"<p>plain HTTP request was sent to HTTPS port", status="400 Bad Request"))
    ),
    "a redirect": Case(Reason.HTTP_ERROR, at("*", "redirect")),
    "too many requests": Case(Reason.HTTP_ERROR, at("*", answer(b"slow down", status="429 Too Many Requests"))),
    "a proxy knows no such method": Case(Reason.HTTP_ERROR, at("*", answer(HTML, status="501 Not Implemented"))),
    "another protocol": Case(
        Reason.HTTP_ERROR, at("*", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
    ),
    "hints without end": Case(
        Reason.TIMEOUT, at("/props", Raw((b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", 0.001), repeat=True))
    ),
    "no content": Case(Reason.HTTP_ERROR, at("*", b"HTTP/1.1 204 No Content\r\n\r\n")),
    "a compute error": Case(Reason.SERVER_ERROR, at("/health", "500")),
    "hangs": Case(Reason.TIMEOUT, at("*", "hang")),
    "drops": Case(Reason.UNREACHABLE, at("*", "drop")),
    "one byte a second": Case(Reason.TIMEOUT, at("*", Raw((_HEAD, b" ", 1.0), repeat=True))),
    "headers, then silence": Case(Reason.TIMEOUT, at("/props", Raw((_HEAD,), then="silence"))),
    "half a header, then silence": Case(Reason.TIMEOUT, at("/props", Raw((_HEAD[:20],), then="silence"))),
    "shorter than it said": Case(Reason.UNREACHABLE, at("/props", answer(props(), length=5000))),
    "chunks that are none": Case(
        Reason.UNREACHABLE, at("/props", chunked(props(), end=b"zz\r\nmore\r\n\r\n")), also=_NOT_HTTP
    ),
    "chunks that end early": Case(Reason.UNREACHABLE, at("/props", chunked(props(), end=b""))),
    "not HTTP": Case(Reason.NOT_LLAMA, at("*", b"SSH-2.0-OpenSSH_9.2\r\n")),
    "a header line without end": Case(Reason.NOT_LLAMA, at("*", b"HTTP/1.1 200 OK\r\nX: " + b"y" * (1 << 20))),
    "ten thousand headers": Case(
        Reason.NOT_LLAMA, at("*", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 10_000 + b"\r\n"), also=frozenset(Reason)
    ),
    "cut JSON": Case(Reason.NOT_LLAMA, at("/props", "garbage")),
    "not UTF-8": Case(Reason.NOT_LLAMA, at("/props", answer(b'{"total_slots": 4, "model_alias": "\xff\xfe\xfa"}'))),
    "deep JSON": Case(Reason.NOT_LLAMA, at("/props", answer(_DEEP))),
    "three million brackets": Case(Reason.NOT_LLAMA, at("/props", answer(_DENSE))),
    "a list": Case(Reason.NOT_LLAMA, at("/props", "wrong_type")),
    "slots as text": Case(Reason.NOT_LLAMA, at("/props", answer(props(total_slots="4")))),
    "no slots": Case(Reason.NOT_LLAMA, at("/props", answer(props(total_slots=0)))),
    "slots of 2^63": Case(Reason.NOT_LLAMA, at("/props", answer(props(total_slots=2**63)))),
    "slots of 400 digits": Case(Reason.NOT_LLAMA, at("/props", answer(props(total_slots=10**400)))),
    "slots of 5000 digits": Case(Reason.NOT_LLAMA, at("/props", answer(b'{"total_slots": 1%s}' % (b"0" * 5000)))),
    "infinite slots": Case(Reason.NOT_LLAMA, at("/props", answer(b'{"total_slots": 1e999}'))),
    "twice, the last of them wrong": Case(
        Reason.NOT_LLAMA, at("/props", answer(b'{"total_slots": 4, "total_slots": -1}'))
    ),
    "a packed bomb": Case(Reason.BAD_ANSWER, at("/props", answer(_BOMB, "Content-Encoding: gzip"))),
    "a body that never ends": Case(
        Reason.BAD_ANSWER, at("/props", Raw((_FLOOD, b"x" * 65536), repeat=True)), also=frozenset({Reason.TIMEOUT})
    ),
    "models without a list": Case(Reason.BAD_ANSWER, at("/v1/models", answer(b'{"data": {}}'))),
    "no models": Case(Reason.BAD_ANSWER, at("/v1/models", answer(b'{"data": []}'))),
    "a router": Case(Reason.MODEL_NOT_NAMED, {"router": [RouterModel(Model(), "loaded")]}),
    "a router that unloaded it": Case(Reason.MODEL_UNLOADED, {"router": [RouterModel(Model())]}, {"model": "tiny"}),
    "a router that let it sleep": Case(
        Reason.SLEEPING, {"router": [RouterModel(Model(), "sleeping")]}, {"model": "tiny"}
    ),
    "a router without it": Case(Reason.UNKNOWN_MODEL, {"router": [RouterModel(Model())]}, {"model": "another"}),
    "a router that failed to load it": Case(
        Reason.MODEL_FAILED, {"router": [RouterModel(Model(), failed=True)]}, {"model": "tiny"}
    ),
    "a router whose list is none": Case(Reason.BAD_ANSWER, at("/models", answer(b"[1, 2]")), {"model": "tiny"}),
    "a router whose status is text": Case(
        Reason.BAD_ANSWER,
        at("/models", answer(b'{"data": [7, {"id": "tiny", "status": "loaded"}]}')),
        {"model": "tiny"},
    ),
}

# Before the first token: nothing is asked for, or refused.
_READY: dict[str, Case] = {
    "asleep": Case(Reason.SLEEPING, {"sleeping": True}),
    "a user": Case(Reason.BUSY, {"foreign": frozenset({"before"})}),
    "a user at the prompt": Case(Reason.BUSY, {"foreign": frozenset({"before"}), "foreign_prefilling": True}),
    "one slot": Case(Reason.TOO_FEW_SLOTS, {"n_slots": 1}),
    "a small context": Case(Reason.CONTEXT_TOO_SMALL, {"n_ctx": 24}),
    "a small context, not told": Case(
        Reason.CONTEXT_TOO_SMALL, {"n_ctx": 12, "props_without": frozenset({"default_generation_settings"})}
    ),
    "slots that are none": Case(Reason.BAD_ANSWER, at("/slots", "wrong_type")),
    "an empty list of slots": Case(Reason.BAD_ANSWER, at("/slots", answer(b"[]"))),
    "slots that do not say": Case(Reason.BAD_ANSWER, at("/slots", answer(b'[{"id": 0, "is_processing": "no"}]'))),
    "slots that hang": Case(Reason.TIMEOUT, at("/slots", "hang")),
    "a completion refused": Case(Reason.NOT_SUPPORTED, {"generates": False}),
    "no completion": Case(Reason.NOT_LLAMA, at("/completion", "404")),
    "a completion redirected": Case(Reason.HTTP_ERROR, at("/completion", "redirect")),
    "a completion behind a login": Case(Reason.UNAUTHORIZED, at("/completion", answer(HTML, status="401 No"))),
    "a completion not understood": Case(Reason.HTTP_ERROR, at("/completion", answer(b"{}", status="400 Bad Request"))),
    "a gateway's time limit": Case(Reason.HTTP_ERROR, at("/completion", answer(HTML, status="504 Gateway Time-out"))),
    "an error that never ends": Case(
        Reason.HTTP_ERROR,
        at("/completion", Raw((_FLOOD.replace(b"200 OK", b"502 Bad"), b"x" * 65536), repeat=True)),
        also=frozenset({Reason.TIMEOUT}),
    ),
}

_NAN, _INF = float("nan"), float("inf")
_NO_MILLISECONDS: list[Any] = [None, _NAN, _INF, -_INF, 0.0, -1.0, 1e-9, 1e12, "12.5", True, [], {}, 2**63]
_NO_COUNTS: list[Any] = [None, _NAN, _INF, "20", True, 2.5, 2**63, 10**400]

# While it generates.
_STREAM: dict[str, Case] = {
    "a decode that fails": Case(Reason.SERVER_ERROR, at("/completion", "500")),
    "an error event": Case(Reason.SERVER_ERROR, {"error_after": 9}),
    "a cache that is full": Case(Reason.SERVER_ERROR, {"kv_cells": 40}),
    "cut after 9 events": Case(Reason.STREAM_CUT, {"cut_after": 9}),
    "cut before the first": Case(Reason.STREAM_CUT, {"cut_after": 0}),
    "ended after two tokens": Case(Reason.STREAM_CUT, at("/completion", _events(None, {"index": 0, "stop": False}))),
    "ended at once": Case(Reason.STREAM_CUT, at("/completion", _events())),
    "chunks that are none, later": Case(
        Reason.STREAM_CUT, at("/completion", chunked(_TOKEN, end=b"xyz\r\n")), also=_NOT_HTTP
    ),
    "a page instead of events": Case(Reason.STREAM_CUT, at("/completion", "html_ok")),
    "one answer instead of events": Case(Reason.STREAM_CUT, at("/completion", answer(b'{"content": "a"}'))),
    "silence after 9 events": Case(Reason.TIMEOUT, {"hang_after": 9}),
    "a completion that hangs": Case(Reason.TIMEOUT, at("/completion", "hang")),
    "one byte of it a second": Case(Reason.TIMEOUT, at("/completion", "slow")),
    "nothing but pings": Case(Reason.TIMEOUT, at("/completion", Raw((_FLOOD, b":\n\n", 0.05), repeat=True))),
    "dropped unanswered": Case(Reason.UNREACHABLE, at("/completion", "drop")),
    "garbage among the events": Case(Reason.BAD_ANSWER, {"garbage_after": 9}),
    "an event that is a list": Case(Reason.BAD_ANSWER, at("/completion", _events([1, 2]))),
    "an event of a stream too many": Case(Reason.BAD_ANSWER, at("/completion", _events({"index": 2, "stop": False}))),
    "an event of stream -1": Case(Reason.BAD_ANSWER, at("/completion", _events({"index": -1, "stop": False}))),
    "a deep event": Case(Reason.BAD_ANSWER, at("/completion", _events(_DEEP))),
    "a dense event": Case(Reason.BAD_ANSWER, at("/completion", _events(_DENSE[:900_000]))),
    "a line without end": Case(Reason.BAD_ANSWER, at("/completion", chunked(_LONG_LINE))),
    "packed events": Case(Reason.BAD_ANSWER, at("/completion", answer(_BOMB, "Content-Encoding: gzip"))),
    "tokens without end": Case(
        Reason.BAD_ANSWER,
        at("/completion", Raw((_FLOOD, _TOKEN * 500), repeat=True)),
        also=frozenset({Reason.TIMEOUT}),
    ),
    "one slot for both": Case(Reason.NOT_TOGETHER, {"same_id_slot": True}),
    "one after another": Case(Reason.NOT_TOGETHER, {"one_at_a_time": True}),
    "no slot told": Case(
        Reason.NOT_TOGETHER,
        at("/completion", _events({**_FINAL}, {**_FINAL, "index": 1})),
        also=frozenset({Reason.BAD_TIMINGS}),
    ),
    "too short": Case(Reason.WRONG_LENGTH, {"stop_after": 5}),
    "ended by a word": Case(Reason.WRONG_LENGTH, {"stop_type": "word"}),
    "ended by itself": Case(Reason.WRONG_LENGTH, {"stop_type": "eos"}),
    "truncated": Case(Reason.WRONG_LENGTH, {"truncated": True}),
    "a cached prompt": Case(Reason.CACHED_PROMPT, {"cache_n": 4}),
    "another prompt": Case(Reason.CACHED_PROMPT, _timed(prompt_n=999)),
    "drafted tokens": Case(Reason.SPECULATIVE, _timed(draft_n=7)),
    "a user too short for the timings": Case(
        Reason.FOREIGN_REQUEST, {"intruders": (Intruder(5, 1, 1),), "prompt_seconds": 0.0}
    ),
    "a user afterwards": Case(Reason.FOREIGN_REQUEST, {"foreign": frozenset({"after"})}),
    "a user who came and went": Case(Reason.FOREIGN_REQUEST, {"intruders": (Intruder(5, 3),)}),
    "no timings": Case(Reason.BAD_TIMINGS, {"drop_timings": True}),
    "timings as a list": Case(
        Reason.BAD_TIMINGS, at("/completion", _events(*({**_FINAL, "index": i, "timings": [1]} for i in (0, 1))))
    ),
    **{f"predicted_ms {v!r}"[:40]: Case(Reason.BAD_TIMINGS, _timed(predicted_ms=v)) for v in _NO_MILLISECONDS},
    **{f"predicted_n {v!r}"[:40]: Case(Reason.BAD_TIMINGS, _timed(predicted_n=v)) for v in _NO_COUNTS},
    "no tokens at all": Case(Reason.WRONG_LENGTH, _timed(predicted_n=0)),
    "fewer than none": Case(Reason.WRONG_LENGTH, _timed(predicted_n=-20)),
}

FAULTS: dict[str, Case] = {**_IDENTITY, **_READY, **_STREAM}

WEIRD = 'a"b\\c{d="e"}\nf\r\x00\x85\u2028\U0001d11e\ud800' + "'#,=%s{{}}"

HARMLESS: dict[str, dict[str, Any]] = {
    "a byte-order mark": at("/props", answer(b"\xef\xbb\xbf" + props())),
    "the wrong content type": at("/props", answer(props(), "Content-Type: text/html; charset=latin-1")),
    "no content type": at("/props", answer(props())),
    "no length": at("/props", b"HTTP/1.1 200 OK\r\n\r\n" + props()),
    "an old protocol": at("/props", b"HTTP/1.0 200 OK\r\n\r\n" + props()),
    "chunks of one byte": at("/props", chunked(props(), size=1)),
    "hints first": at("/props", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + answer(props())),
    "a word to go on first": at("/props", b"HTTP/1.1 100 Continue\r\n\r\n" + answer(props())),
    "drops what it said it keeps": at("/props", answer(props(), "Connection: keep-alive", "Keep-Alive: timeout=5")),
    "trailers": at("/props", chunked(props(), end=b"0\r\nX-Checksum: 1\r\n\r\n")),
    "twice, the last of them right": at("/props", answer(b'{"total_slots": -1, ' + props()[1:])),
    "slots as a whole float": at("/props", answer(props(total_slots=4.0))),
    "an unknown field of every kind": at(
        "/props", answer(props(new=[1, {"x": None}], role="worker", is_sleeping=None))
    ),
    "cookies": at("/props", answer(props(), *(f"Set-Cookie: c{n}={n}" for n in range(50)))),
    "keeps the connection": at("/props", Raw((answer(props(), "Connection: keep-alive"),), then="silence")),
    "a long template": at("/props", answer(props(chat_template="{% if [a, b] %}" * 40_000))),
    "a long name": at("/props", answer(props(model_alias="n" * 100_000))),
    "a name of quotes, newlines and braces": {"model": Model(alias=WEIRD)},
    "a name that is a path": {"model": Model(alias="/srv/../" + WEIRD)},
    "no name": {"model": Model(alias="", path="")},
    "a path that no file can have": {"model": Model(path="/\x00\ud800/model.gguf")},
    "a build of quotes": {"build": WEIRD},
    "pings": {"pings": True},
    "no null first": {"null_event": False},
    "slots behind another key": at("/slots", answer(b"{}", status="401 Unauthorized")),
    "slots switched off": {"slots_enabled": False},
    "no slots on this path": at("/slots", "404"),
    "no size": {"meta": "null"},
    "sizes of 2^63": at(
        "/v1/models", answer(json.dumps({"data": [{"meta": {"size": 2**63, "n_params": -1}}]}).encode())
    ),
    "single times that are none": {"timings_without": frozenset({"cache_n", "prompt_n", "prompt_ms"})},
}

"""A fake llama-server on a real TCP port: it batches, queues and times like the real one, and misbehaves on request.

    async with FakeLlama(Behaviour(n_slots=4, step_seconds=lambda batch: 0.01 * batch)) as fake:
        await probe(fake.url)
        assert fake.asked("/slots") == 0

Behaviour may be changed while the server runs. Time is virtual unless `real_time`: a step "takes" `step_seconds(batch)`
in every timing the server reports, and nothing on the clock.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import fake_llama_answers as answers
from aiohttp import web
from fake_llama_behaviour import Behaviour, Fault, Intruder, Phase, Raw, RouterModel
from fake_llama_engine import Engine, Stream

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fake_llama_answers import Json

__all__ = ["Behaviour", "FakeLlama", "Fault", "Intruder", "Phase", "Raw", "Received", "RouterModel"]

_HTML = "<html><head><title>502 Bad Gateway</title></head><body><h1>502</h1>nginx</body></html>"


@dataclass(frozen=True)
class Received:
    """One request as it arrived; `body` is the decoded JSON, or the bytes if it is none."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Json | bytes
    peer: int  # the other side's port: one for each connection


class FakeLlama:
    """The server; an async context manager that listens on a free port of 127.0.0.1 (or as `start` is told)."""

    def __init__(self, behaviour: Behaviour | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.behaviour = behaviour or Behaviour()
        self.requests: list[Received] = []
        self.woken = 0  # how often a request woke a sleeping model
        self.loaded = 0  # how often a request made the router load a model
        self.url = ""
        self.engine = Engine(self)
        self._engines: dict[str, Engine] = {}  # of a router's models
        self._clock = clock
        self._began = clock()
        self._open_completions = 0
        self._completions = 0
        self._runner: web.AppRunner | None = None
        self._hung = asyncio.Event()  # set when the server stops, so that hanging handlers end

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(
        self, port: int = 0, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, unix: Path | None = None
    ) -> None:
        app = web.Application(middlewares=[self._gate])
        app.on_response_prepare.append(_headers)
        prefix = self.behaviour.api_prefix
        for path in ("/health", "/v1/health"):
            app.router.add_get(prefix + path, self._health)
        for path in ("/models", "/v1/models"):
            app.router.add_get(prefix + path, self._models)
        for path in ("/completion", "/completions"):
            app.router.add_post(prefix + path, self._completion)
        app.router.add_get(prefix + "/props", self._props)
        app.router.add_get(prefix + "/slots", self._slots)
        app.router.add_get(prefix + "/metrics", self._metrics)
        self._hung.clear()
        self._runner = web.AppRunner(app, keepalive_timeout=5, shutdown_timeout=0.2, handler_cancellation=True)
        await self._runner.setup()
        if unix is not None:
            await web.UnixSite(self._runner, str(unix)).start()
            self.url = f"unix:{unix}"
            return
        await web.TCPSite(self._runner, host, port, ssl_context=tls).start()
        scheme, name = "https" if tls else "http", f"[{host}]" if ":" in host else host
        self.url = f"{scheme}://{name}:{self._runner.addresses[0][1]}{prefix}"

    async def stop(self) -> None:
        """Stop listening and close what is open. `start(port)` brings the server back."""
        self._hung.set()
        for engine in (self.engine, *self._engines.values()):
            await engine.stop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def asked(self, path: str) -> int:
        """How many requests there were for this path."""
        return sum(request.path == path for request in self.requests)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The decoded bodies of the completions asked for."""
        return [r.body for r in self.requests if r.path.startswith("/completion") and isinstance(r.body, dict)]

    @property
    def foreign_slots(self) -> int:
        """How many slots other people's requests hold now."""
        phase: Phase = "during" if self._open_completions else "after" if self._completions else "before"
        return self.behaviour.foreign_slots if phase in self.behaviour.foreign else 0

    # what comes before every handler

    @web.middleware
    async def _gate(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        now = self.behaviour
        raw = await request.read()
        try:
            body: Json | bytes = json.loads(raw) if raw else None
        except ValueError:
            body = raw
        headers = {key.lower(): value for key, value in request.headers.items()}
        path = request.path.removeprefix(now.api_prefix)
        peer = request.transport.get_extra_info("peername") if request.transport else None
        port = peer[1] if isinstance(peer, tuple) else 0
        self.requests.append(Received(request.method, path, dict(request.query), headers, body, port))
        fault = now.faults.get(path, now.faults.get("*"))
        if isinstance(fault, Raw):
            return await self._raw(request, fault)
        if fault is not None:
            return await self._broken(request, fault)
        is_models = path in ("/models", "/v1/models")
        if now.loading:
            if is_models and now.models_while_loading:
                return _json(answers.models(now.model, n_ctx=now.n_ctx, meta="null"))
            return _json(answers.LOADING, 503)
        # The server compares the path as it came, so that with a prefix nothing is public.
        public = request.path in ("/health", "/v1/health") or (is_models and now.models_public)
        keys = (headers.get("authorization", "").removeprefix("Bearer "), headers.get("x-api-key"))
        if now.api_key is not None and not public and now.api_key not in keys:
            return _json(answers.UNAUTHORIZED, 401)
        if isinstance(body, bytes):
            text = "[json.exception.parse_error.101] parse error at line 1, column 11: syntax error"
            return _json(answers.error(400, "invalid_request_error", text), 400)
        try:
            response: web.StreamResponse = await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            return _json(answers.NOT_FOUND, 404)
        return response

    async def _broken(self, request: web.Request, fault: str) -> web.StreamResponse:
        if fault.startswith("redirect "):
            _, status, target = fault.split()
            return web.Response(status=int(status), headers={"Location": target})
        whole = {
            "html": web.Response(text=_HTML, content_type="text/html", status=502),
            "html_ok": web.Response(text=_HTML, content_type="text/html"),
            "redirect": web.Response(status=302, headers={"Location": "/login"}),
            "wrong_type": _json({"id": "no list"} if request.path == "/slots" else [1, "two", None]),
            "garbage": web.Response(text='{"default_generation_settings":{"par', content_type="application/json"),
            "404": _json(answers.NOT_FOUND, 404),
            "500": _json(answers.error(500, "server_error", "Compute error."), 500),
        }
        if fault in whole:
            return whole[fault]
        if fault == "slow":
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            while not self._hung.is_set():
                await response.write(b" ")
                await self._hang(1.0)
            return response
        if fault == "hang":
            await self._hang()
        _cut(request)
        return web.Response()

    async def _raw(self, request: web.Request, fault: Raw) -> web.StreamResponse:
        transport = request.transport
        while transport is not None and not transport.is_closing() and not self._hung.is_set():
            for part in fault.parts:
                if isinstance(part, bytes):
                    transport.write(part)
                await self._hang(0.0 if isinstance(part, bytes) else part)
            if not fault.repeat:
                break
        if fault.then == "silence":
            await self._hang()
        elif fault.then == "close" and transport is not None:
            transport.close()
            return web.Response()
        _cut(request)
        return web.Response()

    async def _hang(self, seconds: float | None = None) -> None:
        try:
            await asyncio.wait_for(self._hung.wait(), seconds)
        except TimeoutError:
            return

    # the endpoints

    async def _health(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _props(self, request: web.Request) -> web.Response:
        now = self.behaviour
        asked = self._asked_model(request.query.get("model", ""), request, wakes=False)
        if now.router is not None and "model" not in request.query:
            return _json(answers.router_props(build=now.build))
        if isinstance(asked, web.Response):
            return asked
        sleeping = now.sleeping if now.router is None else asked.status == "sleeping"
        flags = {"slots": now.slots_enabled, "metrics": now.metrics_enabled, "sleeping": sleeping}
        body = answers.props(asked.model, n_slots=now.n_slots, n_ctx=now.n_ctx, build=now.build, **flags)
        return _json({key: value for key, value in body.items() if key not in now.props_without})

    async def _models(self, _: web.Request) -> web.Response:
        now = self.behaviour
        if now.router is not None:
            return _json(answers.router_models([answers.router_model(m, n_ctx=now.n_ctx) for m in now.router]))
        return _json(answers.models(now.model, n_ctx=now.n_ctx, meta=now.meta))

    async def _slots(self, request: web.Request) -> web.Response:
        now = self.behaviour
        asked = self._asked_model(request.query.get("model", ""), request, wakes=True)
        if isinstance(asked, web.Response):
            return asked
        if not now.slots_enabled:
            return _json(answers.not_supported("slots"), 501)
        self._wake()
        engine = self._engine_of(asked)
        engine.take_task()
        views = engine.views()
        for view in views[: self.foreign_slots]:
            step = now.step_seconds(self.foreign_slots)
            decoded = 0 if now.foreign_prefilling else 1 + int((self._clock() - self._began) / step)
            view.busy, view.id_task, view.n_decoded, view.n_remain = True, 900_000 + view.id, decoded, 100_000 - decoded
            view.n_prompt_tokens, view.n_processed = 20 + decoded, 20
        if "fail_on_no_slot" in request.query and all(view.busy for view in views):
            return _json(answers.NO_SLOT, 503)
        return _json([answers.slot(view, now) for view in views])

    async def _metrics(self, request: web.Request) -> web.Response:
        now = self.behaviour
        asked = self._asked_model(request.query.get("model", ""), request, wakes=False)
        if isinstance(asked, web.Response):
            return asked
        if not now.metrics_enabled:
            return _json(answers.not_supported("metrics"), 501)
        text = answers.metrics(self._engine_of(asked).metrics(self.foreign_slots), without=now.metrics_without)
        headers = {"Process-Start-Time-Unix": "2273383613", "Content-Type": "text/plain; version=0.0.4"}
        return web.Response(body=(json.dumps(text) if now.metrics_quoted else text).encode(), headers=headers)

    def _asked_model(self, name: str, request: web.Request, *, wakes: bool) -> RouterModel | web.Response:
        """The model that a request is for, loaded and woken as the router does it, or the router's refusal."""
        now = self.behaviour
        if now.router is None:
            return RouterModel(now.model, "loaded")
        if not name:
            return _json(answers.ROUTER_NO_NAME, 400)
        named = [m for m in now.router if m.model.alias == name or name in m.aliases]
        if not named:
            return _json(answers.ROUTER_UNKNOWN, 400)
        found = named[0]
        if found.status not in ("loaded", "sleeping"):
            if request.query.get("autoload") == "false":
                return _json(answers.ROUTER_UNLOADED, 400)
            found.status, self.loaded = "loaded", self.loaded + 1
        if wakes and found.status == "sleeping":
            found.status, self.woken = "loaded", self.woken + 1
        return found

    def _engine_of(self, asked: RouterModel) -> Engine:
        if self.behaviour.router is None:
            return self.engine
        return self._engines.setdefault(asked.model.alias, Engine(self, asked.model))

    def _wake(self) -> None:
        if self.behaviour.sleeping:
            self.behaviour.sleeping = False
            self.woken += 1

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = self._asked_model(str(body.get("model", "")) if isinstance(body, dict) else "", request, wakes=True)
        if isinstance(asked, web.Response):
            return asked
        if not self.behaviour.generates:
            return _json(answers.NO_COMPLETIONS, 501)
        self._wake()
        prompts = _prompts(body)
        if isinstance(prompts, str):
            return _json(answers.error(400, "invalid_request_error", prompts), 400)
        longest, n_ctx = max(len(prompt) for prompt in prompts), self.behaviour.n_ctx
        if longest >= n_ctx:
            text = f"request ({longest} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it"
            sizes = {"n_prompt_tokens": longest, "n_ctx": n_ctx}
            return _json(answers.error(400, "exceed_context_size_error", text, **sizes), 400)
        self._open_completions += 1
        streams = self._engine_of(asked).submit(prompts, body)
        try:
            if body.get("stream"):
                return await self._send_events(request, streams)
            finals = [await stream.final for stream in streams]
            return _json(finals if len(finals) > 1 else finals[0])
        finally:
            for stream in streams:
                stream.cancelled = True
            self._open_completions -= 1
            self._completions += 1

    async def _send_events(self, request: web.Request, streams: Sequence[Stream]) -> web.StreamResponse:
        now, events = self.behaviour, streams[0].events
        await streams[0].started.wait()  # the headers come when the first stream has its slot
        first = None if now.early_headers else await events.get()  # older builds: with the first token
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if now.null_event:
            await response.write(b"data: null\n\n")
        sent, running = 0, len(streams)
        while running:
            event, is_final = first or await events.get()
            first = None
            if sent == now.hang_after:
                await self._hang()
            if sent in (now.cut_after, now.hang_after):
                _cut(request)
                return response
            if sent == now.garbage_after:
                await response.write(b'data: {"index":0,"content":\n\n')
            if sent == now.error_after:
                event = answers.error(500, "server_error", "Context size has been exceeded.")
            await response.write((":\n\n" if now.pings else "").encode() + f"data: {json.dumps(event)}\n\n".encode())
            if sent == now.error_after:
                return response
            sent += 1
            running -= is_final
        return response


def _prompts(body: Json) -> list[list[int]] | str:
    """The prompts as token lists, or what is wrong with the request, in the server's words."""
    if not isinstance(body, dict) or "prompt" not in body:
        return "[json.exception.out_of_range.403] key 'prompt' not found"
    n_predict, prompt = body.get("n_predict"), body["prompt"]
    if n_predict is not None and not isinstance(n_predict, int):
        return "Field 'n_predict': [json.exception.type_error.302] type must be number, but is string"
    if prompt in ([], ""):
        return '"prompt" must not be empty'
    flat = isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt))
    tokens: list[list[int]] = []
    for one in [prompt] if flat else prompt if isinstance(prompt, list) else [None]:
        if isinstance(one, str):
            tokens.append([2, *(1000 + sum(word.encode()) for word in one.split())])
        elif isinstance(one, list) and all(isinstance(token, int) for token in one):
            tokens.append(one)
        else:
            return '"prompt" elements must be a string, a list of tokens, or a list of mixed strings & tokens.'
    return tokens if all(token >= 0 for one in tokens for token in one) else "Prompt contains invalid tokens"


def _json(body: Json, status: int = 200) -> web.Response:
    response = web.Response(text=json.dumps(body), status=status, content_type="application/json", charset="utf-8")
    if status >= 400:
        response.force_close()
    return response


async def _headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "llama.cpp"
    response.headers["Access-Control-Allow-Origin"] = ""
    if response.keep_alive is not False:
        response.headers["Keep-Alive"] = "timeout=5, max=100"


def _cut(request: web.Request) -> None:
    """End the connection in the middle of whatever it carries."""
    if request.transport is not None:
        request.transport.abort()

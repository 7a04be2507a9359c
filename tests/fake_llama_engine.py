"""The fake server's decode loop: slots, a queue, one step for all generating streams, and the clock of the timings."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import fake_llama_answers as answers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fake_llama import FakeLlama

_SIMILAR = 0.1  # a slot whose content shares more than this part of a prompt is preferred to the least recently used


@dataclass(eq=False)
class Stream:
    """One prompt of a completion, from the queue to its last token; the times are the engine's."""

    index: int
    prompt: Sequence[int]
    request: Mapping[str, Any]
    n_predict: int
    id_task: int
    events: asyncio.Queue[tuple[dict[str, Any], bool]]  # shared by the streams of one request; True: a stream's last
    group: int
    started: asyncio.Event  # shared by the streams of one request: the first of them has a slot
    final: asyncio.Future[dict[str, Any]]
    slot: int = -1
    start: float = 0.0
    first: float = 0.0
    last: float = 0.0
    produced: int = 0
    steps: int = 0  # after the first token
    drafted: int = 0
    accepted: int = 0
    foreign: bool = False
    deferred: bool = False
    cancelled: bool = False


@dataclass
class Slot:
    """What a slot remembers of its last task."""

    used: int = -1
    prompt: Sequence[int] = ()
    view: answers.SlotView | None = None


@dataclass
class Counters:
    """The sums behind /metrics."""

    values: dict[str, float] = field(default_factory=dict)
    busy: int = 0

    def add(self, name: str, value: float) -> None:
        self.values[name] = self.values.get(name, 0) + value


class Engine:
    """Runs while there is work. All streams that have a slot advance together, as in one `llama_decode`."""

    def __init__(self, server: FakeLlama, model: answers.Model | None = None) -> None:
        self._server = server
        self._model = model  # a router's; None for the server's own
        self._slots: dict[int, Slot] = {}
        self._waiting: list[Stream] = []
        self._running: list[Stream] = []
        self._counters = Counters()
        self._now = 0.0
        self._tick = 0
        self._released = 0  # slots since the last assignment
        self._next_task = 0
        self._task: asyncio.Task[None] | None = None

    def submit(self, prompts: Sequence[Sequence[int]], request: Mapping[str, Any]) -> list[Stream]:
        """Queue all prompts of one request at once, as the server posts them."""
        now = self._server.behaviour
        streams = self._queue(prompts, request, stop_after=now.stop_after)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._loop())
        return streams

    def take_task(self) -> int:
        """The next task's number; GET /slots takes one too."""
        task, self._next_task = self._next_task, self._next_task + 1
        return task

    def _queue(
        self,
        prompts: Sequence[Sequence[int]],
        request: Mapping[str, Any],
        *,
        stop_after: int | None = None,
        foreign: bool = False,
    ) -> list[Stream]:
        now = self._server.behaviour
        asked = request.get("n_predict", -1)
        events: asyncio.Queue[tuple[dict[str, Any], bool]] = asyncio.Queue()
        started, group = asyncio.Event(), self._next_task
        loop = asyncio.get_running_loop()
        streams = []
        for index, prompt in enumerate(prompts):
            n_predict = min(asked if asked > 0 else now.n_ctx, now.n_ctx - len(prompt), stop_after or now.n_ctx)
            final: asyncio.Future[dict[str, Any]] = loop.create_future()
            stream = Stream(index, prompt, request, n_predict, self.take_task(), events, group, started, final)
            stream.foreign = foreign
            streams.append(stream)
        self._waiting += streams
        return streams

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        # A server that starts again remembers nothing.
        self._slots, self._waiting, self._running, self._counters = {}, [], [], Counters()
        self._next_task = self._released = 0

    def views(self) -> list[answers.SlotView]:
        """The slots as /slots shows them, without other people's requests."""
        views = [answers.SlotView(id=number) for number in range(self._server.behaviour.n_slots)]
        for number, slot in self._slots.items():
            if slot.view is not None and number < len(views):
                views[number] = replace(slot.view)  # a copy: the caller draws other people's requests over it
        for stream in self._running:
            views[stream.slot] = answers.SlotView(
                id=stream.slot,
                busy=True,
                id_task=stream.id_task,
                n_prompt_tokens=len(stream.prompt) + stream.produced,
                n_processed=len(stream.prompt),
                n_remain=stream.n_predict - stream.produced,
                n_decoded=stream.produced,
                request=stream.request,
            )
        return views

    def metrics(self, foreign: int) -> dict[str, float]:
        """The values of /metrics; `foreign` is the number of other people's running requests."""
        values = dict(self._counters.values)
        values["requests_processing"] = len(self._running) + foreign
        values["requests_deferred"] = len(self._waiting)
        decodes = values.get("n_decode_total", 0)
        values["n_busy_slots_per_decode"] = self._counters.busy / decodes if decodes else 0
        return values

    async def _loop(self) -> None:
        while self._waiting or self._running:
            self._waiting = [stream for stream in self._waiting if not stream.cancelled]
            for stream in [stream for stream in self._running if stream.cancelled]:
                self._release(stream)
            self._assign()
            await self._step()

    async def _step(self) -> None:
        now = self._server.behaviour
        fresh = [stream for stream in self._running if not stream.produced]
        generating = len(self._running) - len(fresh)
        seconds = (now.prompt_seconds if fresh else 0.0) + (self._step_seconds() if generating else 0.0)
        await asyncio.sleep(max(seconds, 0.001) if now.real_time or not self._running else 0)
        if not self._running:
            return
        self._now += seconds
        self._counters.add("n_decode_total", 1)
        self._counters.busy += len(self._running) + self._server.foreign_slots
        self._counters.add("prompt_tokens_total", sum(len(stream.prompt) for stream in fresh))
        self._counters.add("prompt_seconds_total", seconds if fresh else 0.0)
        for stream in sorted(self._running, key=lambda stream: stream.slot):
            self._advance(stream)
        self._let_intruders_in()
        held = sum(len(stream.prompt) + stream.produced for stream in self._running)
        if now.kv_cells is not None and held > now.kv_cells:
            for stream in list(self._running):
                stream.events.put_nowait((answers.CACHE_FULL, True))
                stream.n_predict = stream.produced
                self._release(stream)

    def _let_intruders_in(self) -> None:
        ours = next((stream for stream in self._running if stream.index == 0 and not stream.foreign), None)
        for intruder in self._server.behaviour.intruders if ours is not None else ():
            if ours is not None and ours.produced == intruder.at_token:
                prompt = range(5000, 5000 + intruder.prompt)
                self._queue([prompt], {"n_predict": intruder.tokens, "stream": True}, foreign=True)

    def _step_seconds(self) -> float:
        """One step's time; with split KV every run of adjacent slots is a pass of its own (llama.cpp #25840)."""
        now = self._server.behaviour
        busy = sorted(
            [*range(self._server.foreign_slots), *(stream.slot for stream in self._running if stream.produced)]
        )
        starts = [n for n, slot in enumerate(busy) if not n or (now.split_kv and slot > busy[n - 1] + 1)]
        return sum(now.step_seconds(end - start) for start, end in pairwise([*starts, len(busy)]))

    def _advance(self, stream: Stream) -> None:
        if not stream.produced:
            stream.first = self._now
        stream.last = self._now
        tokens = 1
        if stream.produced and self._server.behaviour.accepted:
            tokens += self._verify(stream)
        stream.steps += bool(stream.produced)
        for _ in range(tokens):
            self._tell_token(stream)
        if stream.produced >= stream.n_predict:
            self._release(stream)
            final = self._final(stream)
            stream.events.put_nowait((final, True))
            stream.final.set_result(final)

    def _verify(self, stream: Stream) -> int:
        """One verification step: how many drafted tokens it accepts, as far as they are still asked for."""
        now = self._server.behaviour
        room = stream.n_predict - stream.produced - 1
        drafted = min(now.drafted, room)
        accepted = min(now.accepted[stream.steps % len(now.accepted)], drafted)
        stream.drafted += drafted
        stream.accepted += accepted
        self._counters.add("spec_decode_num_drafts_total", 1)
        self._counters.add("spec_decode_num_draft_tokens_total", drafted)
        self._counters.add("spec_decode_num_accepted_tokens_total", accepted)
        return accepted

    def _tell_token(self, stream: Stream) -> None:
        stream.produced += 1
        partial = {"index": stream.index, "content": " that", "tokens": [600], "stop": False, "id_slot": -1}
        partial |= {"tokens_predicted": stream.produced, "tokens_evaluated": len(stream.prompt)}
        if stream.request.get("timings_per_token") and self._server.behaviour.per_token_timings:
            partial |= self._timings(stream)
        stream.events.put_nowait((partial, False))

    def _final(self, stream: Stream) -> dict[str, Any]:
        now = self._server.behaviour
        final = {
            "index": stream.index,
            "content": "" if stream.request.get("stream") else " that" * stream.produced,
            "tokens": [],
            "id_slot": 0 if now.same_id_slot else stream.slot,
            "stop": True,
            "model": (self._model or now.model).alias,
            "tokens_predicted": stream.produced,
            "tokens_evaluated": len(stream.prompt),
            "generation_settings": answers.generation_settings(stream.request),
            "prompt": "<unused94>" * len(stream.prompt),
            "has_new_line": False,
            "truncated": now.truncated,
            "stop_type": now.stop_type,
            "stopping_word": "",
            "tokens_cached": len(stream.prompt) + stream.produced - 1,
            **self._timings(stream),
        }
        wanted = stream.request.get("response_fields")
        return {key: final[key] for key in wanted if key in final} if wanted else final

    def _timings(self, stream: Stream) -> dict[str, Any]:
        now = self._server.behaviour
        if now.drop_timings:
            return {}
        values = answers.timings(
            prompt_n=max(len(stream.prompt) - now.cache_n, 0),
            prompt_seconds=stream.first - stream.start,
            predicted_n=stream.produced,
            predicted_seconds=stream.last - stream.first,
            cache_n=now.cache_n,
            old_rate=now.old_rate,
        )
        if stream.drafted:
            values |= {"draft_n": stream.drafted, "draft_n_accepted": stream.accepted}
        values = {key: value for key, value in values.items() if key not in now.timings_without}
        return {"timings": {**values, **now.timing_values}}

    def _assign(self) -> None:
        """Give free slots to waiting streams: the most similar content first, else the least recently used."""
        now = self._server.behaviour
        taken = {stream.slot for stream in self._running} | set(range(self._server.foreign_slots))
        # each released slot moves one deferred task to the *front* of the queue, so these come in reverse order
        deferred = [stream for stream in self._waiting if stream.deferred][: self._released]
        self._released = 0
        for stream in [*reversed(deferred), *(stream for stream in self._waiting if stream not in deferred)]:
            stream.deferred = True
            pinned = stream.request.get("id_slot", -1)
            if pinned >= now.n_slots and now.id_slot_wraps:
                pinned %= now.n_slots
            free = [n for n in range(now.n_slots) if n not in taken and pinned in (-1, n)]
            if not free:
                continue
            if now.one_at_a_time and any(other.group == stream.group for other in self._running):
                continue
            stream.slot = self._choose(free, stream.prompt)
            stream.start = self._now
            taken.add(stream.slot)
            self._waiting.remove(stream)
            self._running.append(stream)
            stream.started.set()

    def _choose(self, free: Sequence[int], prompt: Sequence[int]) -> int:
        slots = {number: self._slots.setdefault(number, Slot()) for number in free}
        similar = {number: _shared(slot.prompt, prompt) / len(prompt) for number, slot in slots.items() if prompt}
        best = max(free, key=lambda number: (similar.get(number, 0.0), -number))
        if similar.get(best, 0.0) > _SIMILAR:
            return best
        return min(free, key=lambda number: (slots[number].used, -number))

    def _release(self, stream: Stream) -> None:
        self._tick += 1
        self._released += 1
        self._running.remove(stream)
        length = len(stream.prompt) + stream.produced - 1
        view = answers.SlotView(id=stream.slot, id_task=stream.id_task, n_prompt_tokens=length, request=stream.request)
        self._slots[stream.slot] = Slot(used=self._tick, prompt=stream.prompt, view=view)
        self._counters.add("tokens_predicted_total", stream.produced)
        self._counters.add("tokens_predicted_seconds_total", stream.last - stream.first)
        longest = max(self._counters.values.get("n_tokens_max", 0), length)
        self._counters.values["n_tokens_max"] = longest


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common prefix."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

"""Probing one server: is it well, which model is it, and how fast does it decode at a batch.

A probe asks first and generates only when nothing speaks against it: a sleeping model is never woken, a busy server is
left to its users, and a batch that the server has no slots for is skipped, not queued. It looks again afterwards: what
somebody else asked for meanwhile voids it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from exporter.measure.answers import Props
from exporter.measure.courtesy import complete_politely
from exporter.measure.host import ContentionMeter
from exporter.measure.listing import ModelSize
from exporter.measure.llama import LlamaClient
from exporter.measure.manners import Manners
from exporter.measure.prompts import PROMPT_FAMILIES, PROMPT_TOKENS, prefill_prompt, probe_prompts
from exporter.roofline.decode import DecodeSample
from exporter.roofline.prefill import PREFILL_TOKENS, PrefillSample, prove_prefill
from exporter.roofline.proof import MIN_STEPS, StepTiming, Stream, prove, steps_to_probe
from exporter.roofline.ramp import has_ramp
from exporter.roofline.reason import Reason
from exporter.roofline.slots import Slot, busy, touched
from exporter.roofline.snapshot import ServerState

MAX_STEPS: Final = 256
"""More steps than this do not sharpen a sample; a fast model's probe is short."""
MAX_TOKENS: Final = 1024
"""More tokens than this are not asked for, however many of them a draft gives at once."""
ASK_TIMEOUT: Final = 5.0
"""Seconds for each of the small questions (health, props, model size, slots)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A server that answered: what it says of itself and of its model."""

    props: Props
    size: ModelSize


async def identify(client: LlamaClient, known: Identity | None = None) -> Identity | Reason:
    """What the server is (GET /health, /props, /v1/models: none of them wakes a sleeping model).

    Args:
        client: The server.
        known: What it was before; while the same model stands behind it, a size that it told is not asked again.
    """
    if (fault := await client.health(ASK_TIMEOUT)) is not None:
        return fault
    props = await client.props(ASK_TIMEOUT)
    if isinstance(props, Reason):
        return props
    told = known is not None and known.size.weight_bytes is not None
    if known is not None and told and replace(known.props, sleeping=props.sleeping) == props:
        return Identity(props, known.size)
    size = await client.model_size(ASK_TIMEOUT)
    return size if isinstance(size, Reason) else Identity(props, size)


def state_of(answer: Identity | Reason) -> ServerState:
    """The state that an answer, or the lack of one, puts a server in."""
    if isinstance(answer, Identity):
        return ServerState.SLEEPING if answer.props.sleeping else ServerState.READY
    return _STATES.get(answer, ServerState.UNREACHABLE)


_STATES: Final = {
    Reason.LOADING: ServerState.LOADING,
    Reason.UNAUTHORIZED: ServerState.UNAUTHORIZED,
    Reason.API_KEY_UNREADABLE: ServerState.UNAUTHORIZED,
    Reason.NOT_LLAMA: ServerState.UNSUPPORTED,
    Reason.NOT_SUPPORTED: ServerState.UNSUPPORTED,
    Reason.MODEL_NOT_NAMED: ServerState.UNSUPPORTED,
    Reason.UNKNOWN_MODEL: ServerState.UNSUPPORTED,
    # A router loads it for the next user.
    Reason.MODEL_UNLOADED: ServerState.SLEEPING,
    Reason.SLEEPING: ServerState.SLEEPING,
    Reason.BAD_ANSWER: ServerState.UNSUPPORTED,
}


@dataclass(frozen=True, slots=True)
class _Run:
    """One proven run, and whether the machine's processors were under pressure meanwhile."""

    timing: StepTiming
    contended: bool


class DecodeProbe:
    """Decode probes of one server.

    Args:
        client: The server.
        contention: Tells whether the machine was under pressure meanwhile.
        clock: Monotonic seconds.
        seconds: Target decode time of one probe.
        timeout: Seconds for one request.
        manners: What is known of the server's users; asked and told here.
    """

    def __init__(
        self,
        client: LlamaClient,
        contention: ContentionMeter,
        clock: Callable[[], float],
        *,
        seconds: float,
        timeout: float,
        manners: Manners | None = None,
    ) -> None:
        self.client = client
        self.manners = manners or Manners(clock)
        self._contention = contention
        self._clock = clock
        self._seconds = seconds
        self._timeout = timeout
        self._step_seconds: dict[int, float] = {}
        self._family = 0
        self._gain = 1.0
        self._before: tuple[Slot, ...] | Reason | None = None

    async def ready(self, identity: Identity, batch: int) -> Reason | None:
        """Why a probe at this batch must not be made now, or None. `/slots` is asked only of a model that is awake."""
        if identity.props.sleeping:
            return Reason.SLEEPING
        if batch > identity.props.slots:
            return Reason.TOO_FEW_SLOTS
        if _most_steps(identity) < MIN_STEPS:
            return Reason.CONTEXT_TOO_SMALL
        slots = self._before = await self._look(identity)
        if isinstance(slots, Reason):
            return slots
        if slots is not None:
            self.manners.see_slots(slots)
            if busy(slots):
                return Reason.BUSY
            self.manners.touched()
        return self.manners.objection(batch, identity.props.slots)

    async def measure(self, identity: Identity, batch: int) -> DecodeSample | Reason:
        """One decode sample at `batch`, proven from the server's own evidence, or why there is none."""
        expected = self._expected_step_seconds(batch)
        if expected is None:
            # The model's speed is not known yet: a short first run finds it, and keeps the real one within its time.
            first = await self._generate(identity, batch, MIN_STEPS)
            if isinstance(first, Reason):
                return first
            expected = self._learn(first.timing)
        steps = steps_to_probe(self._seconds, expected, MAX_STEPS)
        run = await self._generate(identity, batch, steps)
        if isinstance(run, Reason):
            return run
        timing = run.timing
        self._step_seconds[batch] = self._learn(timing)
        if timing.steps < MIN_STEPS:
            # Drafts were accepted so well that too few steps are left; the next probe asks for more tokens.
            return Reason.SPECULATIVE
        return DecodeSample(
            batch=batch,
            step_seconds=timing.seconds(contended=run.contended),
            step_spread_ratio=timing.spread_ratio,
            steps=timing.steps,
            depth=timing.depth,
            contended=run.contended,
            measured_at=self._clock(),
            speculative=timing.speculative,
            tokens_per_step=timing.tokens_per_step,
        )

    async def prefill(self, identity: Identity) -> PrefillSample | Reason:
        """The time of one long prompt, if `ready` has nothing against asking, or why there is none."""
        if identity.props.context is not None and identity.props.context <= PREFILL_TOKENS:
            return Reason.CONTEXT_TOO_SMALL
        before = self._contention.read()
        streams = await self.client.complete([prefill_prompt(identity.size.vocabulary)], 1, self._timeout)
        contended = self._contention.contended_since(before)
        if isinstance(streams, Reason):
            return streams
        seconds = prove_prefill(streams[0], PREFILL_TOKENS)
        if isinstance(seconds, Reason):
            return seconds
        fault = await self._witnessed(identity, streams)
        if isinstance(fault, Reason):
            return fault
        return PrefillSample(PREFILL_TOKENS, seconds, contended)

    def forget(self) -> None:
        """Another model stands behind the server: its speed is not known any more."""
        self._step_seconds.clear()
        self._gain = 1.0

    def _learn(self, timing: StepTiming) -> float:
        """The step time, seconds, and how many tokens a step gives, for the next probe's length."""
        self._gain = timing.tokens_per_step
        return timing.step_seconds

    def _expected_step_seconds(self, batch: int) -> float | None:
        """The last step time of this batch, else what a smaller one says at worst: a step grows at most as B does."""
        known = [b for b in self._step_seconds if b <= batch]
        return self._step_seconds[max(known)] * batch / max(known) if known else None

    async def _generate(self, identity: Identity, batch: int, steps: int) -> _Run | Reason:
        """One proven run; where the streams landed on scattered slots, other prompts are seated side by side first."""
        run: _Run | Reason = Reason.SCATTERED_SLOTS
        for _ in range(PROMPT_FAMILIES):
            run = await self._generate_once(identity, batch, steps)
            if run is not Reason.SCATTERED_SLOTS:
                break
            self._family = (self._family + 1) % PROMPT_FAMILIES
            await self._seat(identity, probe_prompts(batch, identity.size.vocabulary, self._family))
        return run

    async def _generate_once(self, identity: Identity, batch: int, steps: int) -> _Run | Reason:
        tokens = min(ceil(steps * self._gain), MAX_TOKENS, _most_steps(identity)) + 1
        prompts = probe_prompts(batch, identity.size.vocabulary, self._family)
        reading = self._contention.read()
        streams = await complete_politely(self.client, identity.props, prompts, tokens, self._timeout)
        contended = self._contention.contended_since(reading)
        self.manners.touched()
        if isinstance(streams, Reason):
            return streams
        witnessed = await self._witnessed(identity, streams)
        if isinstance(witnessed, Reason):
            return witnessed
        timing = prove(streams, batch, tokens, PROMPT_TOKENS)
        if isinstance(timing, Reason):
            return timing
        if not witnessed and has_ramp(timing.step_ms):
            return Reason.FOREIGN_REQUEST
        return _Run(timing, contended)

    async def _seat(self, identity: Identity, prompts: Sequence[Sequence[int]]) -> None:
        """Puts each prompt into a slot of its own, side by side, so that the next request for them finds them there.

        Where users' requests leave the slots used longest ago apart, the streams of a batch land apart. The slots with
        the least of users' tokens are taken.
        """
        if isinstance(self._before, tuple):
            taken = {s.number: 0 if s.probe else s.tokens or 0 for s in self._before}
        else:
            taken = {}
        places = range(identity.props.slots - len(prompts) + 1)
        first = min(places, key=lambda n: sum(taken.get(n + i, 0) for i in range(len(prompts))))
        for slot, prompt in enumerate(prompts, start=first):
            await self.client.complete([prompt], 1, self._timeout, slot)
        self._before = await self._look(identity)

    async def _witnessed(self, identity: Identity, streams: Sequence[Stream]) -> bool | Reason:
        """Whether the slots bear witness that nobody else was served meanwhile; a reason when somebody was."""
        before = self._before
        after = self._before = await self._look(identity)
        if isinstance(after, Reason):
            return after
        if after is None:
            return False
        own = {s.slot for s in streams if s.slot is not None}
        self.manners.see_slots(after, own)
        if busy(after):
            return Reason.FOREIGN_REQUEST
        if not isinstance(before, tuple) or len(own) < len(streams):
            return False
        if touched(before, after, own):
            return Reason.FOREIGN_REQUEST
        return all(slot.task is not None for slot in after if slot.number in own)

    async def _look(self, identity: Identity) -> tuple[Slot, ...] | Reason | None:
        """The slots, or None where the server does not show them."""
        if not identity.props.has_slots_endpoint:
            return None
        slots = await self.client.slots(ASK_TIMEOUT)
        # Switched off or behind another key: what the streams themselves show has to do.
        return None if slots in {Reason.NOT_SUPPORTED, Reason.UNAUTHORIZED, Reason.NOT_LLAMA} else slots


def _most_steps(identity: Identity) -> int:
    """The steps that fit into a slot's context after the prompt and the first token."""
    return MAX_STEPS if identity.props.context is None else identity.props.context - PROMPT_TOKENS - 1

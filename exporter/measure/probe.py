"""Probing one server: is it well, which model is it, and how fast does it decode at a batch.

A probe asks first and generates only when nothing speaks against it: a sleeping model is never woken, a busy server is
left to its users, and a batch that the server has no slots for is skipped, not queued.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from exporter.measure.answers import Props
from exporter.measure.host import ContentionMeter
from exporter.measure.listing import ModelSize
from exporter.measure.llama import LlamaClient
from exporter.roofline.decode import DecodeSample
from exporter.roofline.prefill import PREFILL_TOKENS, PrefillSample, prove_prefill
from exporter.roofline.proof import MIN_STEPS, StepTiming, prove, steps_to_probe
from exporter.roofline.reason import Reason
from exporter.roofline.slots import busy
from exporter.roofline.snapshot import ServerState

PROMPT_TOKENS: Final = 16
COMMON_TOKENS: Final = 9
"""How many tokens the prompts of a family share at their beginning: more than the half that older builds ask for."""
PROMPT_FAMILIES: Final = 3
MAX_STEPS: Final = 256
"""More steps than this do not sharpen a sample; a fast model's probe is short."""
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
    Reason.MODEL_FAILED: ServerState.UNSUPPORTED,
    # A router loads it for the next user.
    Reason.MODEL_UNLOADED: ServerState.SLEEPING,
    Reason.SLEEPING: ServerState.SLEEPING,
    Reason.BAD_ANSWER: ServerState.UNSUPPORTED,
}


class DecodeProbe:
    """Decode probes of one server.

    Args:
        client: The server.
        contention: Tells whether the machine was under pressure meanwhile.
        clock: Monotonic seconds.
        seconds: Target decode time of one probe.
        timeout: Seconds for one request.
    """

    def __init__(
        self,
        client: LlamaClient,
        contention: ContentionMeter,
        clock: Callable[[], float],
        *,
        seconds: float,
        timeout: float,
    ) -> None:
        self.client = client
        self._contention = contention
        self._clock = clock
        self._seconds = seconds
        self._timeout = timeout
        self._step_seconds: dict[int, float] = {}
        self._family = 0

    async def ready(self, identity: Identity, batch: int) -> Reason | None:
        """Why a probe at this batch must not be made now, or None. `/slots` is asked only of a model that is awake."""
        if identity.props.sleeping:
            return Reason.SLEEPING
        if batch > identity.props.slots:
            return Reason.TOO_FEW_SLOTS
        if _most_steps(identity) < MIN_STEPS:
            return Reason.CONTEXT_TOO_SMALL
        return await self._others(identity, Reason.BUSY)

    async def measure(self, identity: Identity, batch: int) -> DecodeSample | Reason:
        """One decode sample at `batch`, proven from the server's own evidence, or why there is none."""
        expected = self._expected_step_seconds(batch)
        if expected is None:
            # The model's speed is not known yet: a short first run finds it, and keeps the real one within its time.
            first = await self._generate(identity, batch, MIN_STEPS)
            if isinstance(first, Reason):
                return first
            expected = first.step_seconds
        steps = steps_to_probe(self._seconds, expected, min(MAX_STEPS, _most_steps(identity)))
        before = self._contention.read()
        timing = await self._generate(identity, batch, steps)
        contended = self._contention.contended_since(before)
        if isinstance(timing, Reason):
            return timing
        self._step_seconds[batch] = timing.step_seconds
        return DecodeSample(
            batch=batch,
            step_seconds=timing.step_seconds,
            step_spread_ratio=timing.spread_ratio,
            steps=timing.steps,
            depth=timing.depth,
            contended=contended,
            measured_at=self._clock(),
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
        fault = await self._others(identity, Reason.FOREIGN_REQUEST)
        return fault or PrefillSample(PREFILL_TOKENS, seconds, contended)

    def forget(self) -> None:
        """Another model stands behind the server: its speed is not known any more."""
        self._step_seconds.clear()

    def _expected_step_seconds(self, batch: int) -> float | None:
        """The last step time of this batch, else what a smaller one says at worst: a step grows at most as B does."""
        known = [b for b in self._step_seconds if b <= batch]
        return self._step_seconds[max(known)] * batch / max(known) if known else None

    async def _generate(self, identity: Identity, batch: int, steps: int) -> StepTiming | Reason:
        """One proven run; where the streams landed on scattered slots, other prompts may land them side by side."""
        timing: StepTiming | Reason = Reason.SCATTERED_SLOTS
        for _ in range(PROMPT_FAMILIES):
            timing = await self._generate_once(identity, batch, steps)
            if timing is not Reason.SCATTERED_SLOTS:
                break
            self._family = (self._family + 1) % PROMPT_FAMILIES
        return timing

    async def _generate_once(self, identity: Identity, batch: int, steps: int) -> StepTiming | Reason:
        tokens = steps + 1
        prompts = probe_prompts(batch, identity.size.vocabulary, self._family)
        streams = await self.client.complete(prompts, tokens, self._timeout)
        if isinstance(streams, Reason):
            return streams
        timing = prove(streams, batch, tokens, PROMPT_TOKENS)
        if isinstance(timing, Reason):
            return timing
        return await self._others(identity, Reason.FOREIGN_REQUEST) or timing

    async def _others(self, identity: Identity, meaning: Reason) -> Reason | None:
        """`meaning` when some slot works on a request; None when all are idle or the server does not tell."""
        if not identity.props.has_slots_endpoint:
            return None
        slots = await self.client.slots(ASK_TIMEOUT)
        if isinstance(slots, Reason):
            # Switched off or behind another key: what the streams themselves show has to do.
            return None if slots in {Reason.NOT_SUPPORTED, Reason.UNAUTHORIZED, Reason.NOT_LLAMA} else slots
        return meaning if busy(slots) else None


def _most_steps(identity: Identity) -> int:
    """The steps that fit into a slot's context after the prompt and the first token."""
    return MAX_STEPS if identity.props.context is None else identity.props.context - PROMPT_TOKENS - 1


def probe_prompts(batch: int, vocabulary: int | None, family: int = 0) -> list[list[int]]:
    """`batch` different prompts of valid token ids; those of one family begin alike.

    A server gives a prompt to the idle slot whose content begins like it, lowest first, else to the least recently
    used one. Beginning alike, the prompts of successive probes return to the same slots, side by side; ending
    differently, the streams share neither their cache nor, in a mixture of experts, their route.

    Args:
        batch: Number of prompts.
        vocabulary: Number of token ids; None takes ids that every known vocabulary has.
        family: Which beginning, 0 to PROMPT_FAMILIES - 1.
    """
    ids = _token_ids(vocabulary, PROMPT_TOKENS * (batch + PROMPT_FAMILIES))
    common = ids[family * PROMPT_TOKENS :][:COMMON_TOKENS]
    ends = (ids[(PROMPT_FAMILIES + s) * PROMPT_TOKENS :][: PROMPT_TOKENS - COMMON_TOKENS] for s in range(batch))
    return [common + end for end in ends]


def prefill_prompt(vocabulary: int | None) -> list[int]:
    """A long prompt that begins like no decode probe's; its ids differ as far as the vocabulary has enough."""
    return _token_ids(vocabulary, PREFILL_TOKENS)[::-1]


def _token_ids(vocabulary: int | None, count: int) -> list[int]:
    """Valid ids; a prime stride spreads them over the vocabulary, away from the special tokens at its start."""
    size = vocabulary or 256
    return [(size // 3 + 7919 * i) % size for i in range(count)]

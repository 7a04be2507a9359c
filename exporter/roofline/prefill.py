"""One long prompt placed under the roof: the other end of a server's work, where computing and not reading takes long.

FLOPs = n x 2 x parameters multiplied for one token + 2 x the head's (only the last token's logits are computed)
+ attention, where token i attends to the i tokens up to itself. The last layer is counted whole, though llama.cpp
computes its feed-forward part for the last token only.
Bytes = the weights once, as llama.cpp reads them for each --ubatch-size (512 by default) tokens: the least there is,
and the intensity the most. With sliding windows the server cuts the prompt for a checkpoint (gemma-3: two passes).
"""

from dataclasses import dataclass
from typing import Final

from exporter.roofline.ceiling import Roof
from exporter.roofline.footprint import Attention, Footprint
from exporter.roofline.proof import LEAST_MS, Stream
from exporter.roofline.reason import Reason

PREFILL_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """What was measured: the prompt's tokens, and the server's own time for them and for the first token's sampling.

    Attributes:
        contended: The machine's processors were under pressure meanwhile.
    """

    tokens: int
    seconds: float
    contended: bool

    @property
    def tokens_per_second(self) -> float:
        """The prompt's rate."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A sample with what follows from it; None where the model's parts, or the roof, are not known.

    Attributes:
        above_ridge: Its intensity is beyond the ridge, so that the compute peak bounds it and not the memory.
        compute_ratio: Its FLOP/s / the compute peak.
    """

    sample: PrefillSample
    flops: float | None = None
    bytes: float | None = None
    intensity_flops_per_byte: float | None = None
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    above_ridge: bool | None = None
    compute_ratio: float | None = None


def prove_prefill(stream: Stream, tokens: int) -> float | Reason:
    """The server's own seconds for a prompt of `tokens` tokens, or why they are not known."""
    if stream.prompt is None or stream.prompt_ms is None or not stream.prompt_ms >= LEAST_MS:
        return Reason.BAD_TIMINGS
    # `prompt` is without what came from the cache; older builds do not tell the rest.
    if stream.cached or stream.prompt != tokens:
        return Reason.CACHED_PROMPT
    if stream.predicted != 1 or stream.truncated:
        return Reason.WRONG_LENGTH
    return stream.prompt_ms / 1e3


def prefill_flops(footprint: Footprint, tokens: int) -> float | None:
    """FLOPs of a prompt; None where it is not known how much of the parameters is the head."""
    if footprint.head_parameters is None:
        return None
    active = sum(e.parameters * e.used / e.count for e in footprint.experts)
    multiplied = tokens * (footprint.parameters - footprint.head_parameters + active) + footprint.head_parameters
    return 2 * multiplied + sum(a.flops_per_token * _attended(a, tokens) for a in footprint.attention or ())


def _attended(attention: Attention, tokens: int) -> float:
    """Sum over the prompt's tokens of how many each attends to: 1, 2, 3, ... up to the window, and then the window."""
    growing = tokens if attention.window is None else min(tokens, attention.window)
    return growing * (growing + 1) / 2 + (tokens - growing) * growing


def place_prefill(sample: PrefillSample, footprint: Footprint | None, roof: Roof) -> PrefillPoint:
    """Places a prompt under its roof."""
    flops = None if footprint is None else prefill_flops(footprint, sample.tokens)
    read = 0.0 if footprint is None else footprint.weight_bytes_of(sample.tokens)
    if flops is None or read <= 0:
        return PrefillPoint(sample)
    intensity, rate = flops / read, flops / sample.seconds
    ridge, peak = roof.ridge_flops_per_byte, roof.compute_flops_per_second
    return PrefillPoint(
        sample,
        flops=flops,
        bytes=read,
        intensity_flops_per_byte=intensity,
        flops_per_second=rate,
        bytes_per_second=read / sample.seconds,
        above_ridge=None if ridge is None else intensity > ridge,
        compute_ratio=None if peak is None else rate / peak,
    )

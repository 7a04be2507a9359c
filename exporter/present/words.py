"""Plain words and human numbers: what each state and reason means and what to do, and how figures are shown."""

from collections.abc import Mapping
from math import floor, log10
from types import MappingProxyType
from typing import Final

from exporter.roofline.ceiling import CeilingSource, Roof
from exporter.roofline.decode import DecodePoint
from exporter.roofline.footprint import BytesSource
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import ServerState
from exporter.roofline.verdict import Bound, Doubt, Prediction, Remedy

MISSING: Final = "-"
"""Stands where there is no number."""

REASONS: Final[Mapping[Reason, str]] = MappingProxyType(
    {
        Reason.UNREACHABLE: "nothing at the server's url gives an answer; check the url, http or https included, that"
        " llama-server runs, and for a unix socket that this user may write to it",
        Reason.CERTIFICATE_REFUSED: "the server's certificate is refused, for its authority is not known here, it has"
        " expired, or it is made for another name; set ca_file for a private authority, renew it, or write its name in"
        " the url",
        Reason.TLS_FAILED: "the url and the server disagree on TLS; write http:// if the server speaks none, and"
        " https:// if it does (client certificates are not supported)",
        Reason.TIMEOUT: "the server did not answer in time, 5 s for a question and probe.timeout for a probe; raise the"
        " latter if the model is only slow",
        Reason.LOADING: "the server is still loading its model; nothing to do, probes start when it is ready",
        Reason.UNAUTHORIZED: "the server wants an API key, or another than it was sent; api_key_file must name a file"
        " that holds it",
        Reason.NOT_LLAMA: "what answers there is not a llama.cpp server, or not all of one; check the url, with the"
        " server's --api-prefix if it has one, and update a server from before 2025",
        Reason.HTTP_ERROR: "the answer is an HTTP error, or a redirect, which is not followed; check the url, http or"
        " https included, a proxy before the server, and the server's log",
        Reason.BAD_ANSWER: "the answer is not what llama-server sends; check for a proxy, or a very old or new build",
        Reason.SERVER_ERROR: "the server met an error while decoding; see its log",
        Reason.NOT_SUPPORTED: "the server says that it does not offer this; one for embeddings or reranking cannot be"
        " measured, and --slots and --metrics switch endpoints on",
        Reason.MODEL_NOT_NAMED: "this is a router; name one of its models with model: in the configuration",
        Reason.UNKNOWN_MODEL: "the server has no model of that name; the exporter's log lists its models, write one of"
        " them at model:",
        Reason.MODEL_FAILED: "the router could not load the model; see its log",
        Reason.API_KEY_UNREADABLE: "api_key_file cannot be read, or does not hold one API key; check-config tells what"
        " is wrong with it",
        Reason.STREAM_CUT: "the answer ended early; see the server's log, and a proxy's time limits",
        Reason.FOREIGN_REQUEST: "a user's request ran during the probe, so the batch is not proven; it is retried",
        Reason.NOT_TOGETHER: "the streams did not decode together; it is retried, else give the server more slots",
        Reason.SCATTERED_SLOTS: "the streams sit on slots apart, which costs a second read of the weights; start"
        " llama-server with --kv-unified",
        Reason.WRONG_LENGTH: "the streams did not generate the tokens that were asked for; see the server's log",
        Reason.CACHED_PROMPT: "the server answered from its prompt cache, so the timing is not proven; it is retried",
        Reason.GAVE_WAY: "a user's request arrived during a long probe, and the probe gave way; it is retried",
        Reason.SPECULATIVE: "the server drafts tokens, and then only batch 1 can be proven, given enough steps between"
        " its tokens; for larger batches run it without a draft",
        Reason.BAD_TIMINGS: "the server's timings contradict themselves; it is retried, else update llama-server",
        Reason.BUSY: "the server was busy with users; it is probed when it is idle",
        Reason.SLEEPING: "the server sleeps and is not woken for a probe; it is probed after its next user",
        Reason.KEEPS_AWAKE: "the server may fall asleep when left alone, and a probe would keep it awake; it is probed"
        " after its next user",
        Reason.MODEL_UNLOADED: "the router has not loaded the model, and it is not loaded for a probe; it is probed"
        " after its next user",
        Reason.CACHE_IN_USE: "a user's conversation is cached in a slot that the batch would take; it is probed after"
        " 30 minutes without it",
        Reason.SLOTS_IN_USE: "the batch takes every slot, and users had some of them a moment ago; it is probed after"
        " one interval without users",
        Reason.TOO_FEW_SLOTS: "the server has fewer slots than the batch; start llama-server with --parallel 4, or"
        " as many as the largest batch",
        Reason.CONTEXT_TOO_SMALL: "a slot's context is too small for a probe; give llama-server a larger --ctx-size",
        Reason.PREEMPTED: "other processes took the processors meanwhile; measure again on a quieter machine",
        Reason.THROTTLED: "the container's CPU quota ran out meanwhile; give the exporter no CPU limit",
        Reason.MEMORY_PRESSURE: "memory was short meanwhile; free some, or lower bandwidth.max_memory",
        Reason.PAGE_FAULTS: "memory was not resident meanwhile; free memory, or lower bandwidth.max_memory",
        Reason.IMBALANCED: "the threads finished too far apart; leave bandwidth.threads at auto, or quiet the machine",
        Reason.UNSTABLE: "the passes disagree too much; measure again on a quieter machine",
        Reason.CACHE_SUSPECT: "the arrays may fit in a cache; raise the container's memory limit (70 MiB, and"
        " 7 MiB for each CPU), and bandwidth.max_memory",
        Reason.INVALID_RESULT: "a kernel computed wrong values; suspect the memory or the build",
        Reason.NO_MEMORY: "there is too little free memory for the arrays; free some, or raise the container's limit",
        Reason.NO_THREADS: "threads could not be started; raise the process limit (pids.max, ulimit -u)",
        Reason.CANCELLED: "the measurement was stopped; it is repeated at the next interval",
        Reason.UNSUPPORTED: "the kernels do not support this processor; set compute_peak, or device: gpu with"
        " peak_bandwidth",
    }
)
"""One sentence for each reason: what happened, and the remedy."""

BYTES_SOURCES: Final[Mapping[BytesSource, str]] = {
    BytesSource.FILE: "Its bytes are exact, from the model file.",
    BytesSource.CONFIGURED: "Its bytes are the configured active_weight_bytes; its KV cache is not counted.",
    BytesSource.SERVER: "Its bytes are the server's own sums over all tensors: an upper bound for the weights of a"
    " step, and so is the floor; its KV cache is not counted.",
}
"""Where a model's bytes come from, as people are told."""

STATES: Final[Mapping[ServerState, str]] = MappingProxyType(
    {
        ServerState.READY: "the server answers and is idle",
        ServerState.BUSY: "the server is generating for users",
        ServerState.SLEEPING: "the server has put its model away and wakes with the next request",
        ServerState.LOADING: "the server is loading its model",
        ServerState.UNAUTHORIZED: "the server refuses the exporter's API key, or wants one",
        ServerState.UNREACHABLE: "the server does not answer",
        ServerState.UNSUPPORTED: "something answers, but it cannot be measured as a llama.cpp server",
        ServerState.STALLED: "the server accepts requests, but makes no progress with them; look at its process's state"
        " first (ps -o pid,stat -C llama-server: T is stopped, and kill -CONT lets it go on), then at its log",
    }
)
"""One sentence for each state of a server."""


def state_words(state: ServerState, reason: Reason | None) -> str:
    """What a state means and what to do: its reason's sentence where it has one."""
    # That a stalled server did not answer in time says less than that it is stalled.
    return STATES[state] if reason is None or state is ServerState.STALLED else REASONS[reason]


BOUNDS: Final[Mapping[Bound, str]] = MappingProxyType(
    {
        Bound.ABOVE_CEILING: "Above the ceiling, so the ceiling or the model's bytes are wrong",
        Bound.BANDWIDTH: "Bandwidth-bound, for reading the memory fills most of the step",
        Bound.COMPUTE: "Compute-bound, for every stream brings work of its own that sharing the read does not save",
        Bound.OVERHEAD: "Overhead-bound, for neither reading nor computing fills the step",
        Bound.UNKNOWN: "What holds decode back is not known",
    }
)
"""What each verdict means; its evidence follows behind a colon."""

REMEDIES: Final[Mapping[Remedy, str]] = MappingProxyType(
    {
        Remedy.CHECK_CEILING: "a right ceiling and right bytes",
        Remedy.FEWER_WEIGHT_BYTES: "fewer weight bytes (a smaller quantization, or a smaller model)",
        Remedy.FEWER_KV_BYTES: "fewer KV bytes (--cache-type-k and --cache-type-v q8_0, or shorter contexts)",
        Remedy.FEWER_KERNELS: "fewer and larger kernels (--flash-attn on, a newer llama.cpp)",
        Remedy.MORE_STREAMS: "more streams together, each costing less than half a step of its own (--parallel)",
        Remedy.MORE_THREADS: "more threads, up to one for each physical core (--threads)",
        Remedy.FEWER_THREADS: "fewer threads than before, for others wanted the processors meanwhile (--threads)",
        Remedy.MORE_BATCHES: "measurements of batch 1 and of a larger one (as many slots: --parallel)",
    }
)
"""What would help, and how it is asked for."""

DOUBTS: Final[Mapping[Doubt, str]] = MappingProxyType(
    {
        Doubt.CONTENDED: "that is not to be trusted, for others wanted the processors while batch 1 or batch {batch}"
        " was probed",
        Doubt.UNEVEN: "that is not to be trusted, for the single steps of batch 1 or batch {batch} differ widely",
        Doubt.FASTER_TOGETHER: "that cannot be, so batch 1's or batch {batch}'s sample is not typical",
    }
)
"""Why the growth that was just told says nothing."""

ON_GPU_RATIO: Final = 1.3
"""Above this many times `read` the likely cause is that the weights are in another memory."""


def implausible_cause(point: DecodePoint, roof: Roof) -> tuple[float, str] | None:
    """How many times the ceiling that no reader can pass an implausible step reads, and the likely cause.

    None for a step that is plausible, or of which that is not known.
    """
    rate, hard = point.step_bytes_per_second, roof.hard_bytes_per_second
    if not point.implausible or rate is None or hard is None:
        return None
    ratio = rate / hard
    if CeilingSource.READ not in roof.ceilings:
        return ratio, "peak_bandwidth is too low or the model's bytes are wrong: see the spec sheet, and set gguf"
    if ratio > ON_GPU_RATIO:
        return ratio, f"more than {ON_GPU_RATIO:g} x read: is this server on a GPU? set device: gpu"
    return ratio, "the model's bytes are wrong or read is too low: set gguf, and measure read on a quiet machine"


PREDICTIONS: Final[Mapping[Prediction, str]] = MappingProxyType(
    {
        Prediction.INTENSITY_BELOW_RIDGE: "one token's intensity is below the ridge",
        Prediction.SINGLE_STREAM_ABOVE_40_PERCENT: "a single stream's steps reach more than 40 % of the reference",
        Prediction.BATCHING_RAISES_THROUGHPUT: "batching raises the tokens/s of all streams",
    }
)
"""What was predicted of decode."""


def three_digits(value: float) -> str:
    """The number with three significant digits and without an exponent: 0.0123, 1.23, 12.3, 12300."""
    rounded = float(f"{value:.3g}")
    if rounded == 0:
        return "0"
    return f"{rounded:.{max(0, 2 - floor(log10(abs(rounded))))}f}"


def binary_size(size: int) -> str:
    """A cache's or a memory's size as it is written on the box: 32 MiB, 64 GiB."""
    for unit, bytes_ in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_:
            return f"{three_digits(size / bytes_).removesuffix('.0').removesuffix('.00')} {unit}"
    return f"{size} B"


def si(value: float, unit: str) -> str:
    """The number with an SI prefix, as in `700 MB`, `1.10 G` or `40.0 GB/s`."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{three_digits(value / factor)} {prefix}{unit}".rstrip()
    return f"{three_digits(value)} {unit}".rstrip()


def age(seconds: float) -> str:
    """A time that has passed, in the largest unit that gives at least 2: `45 s`, `12 min`, `5 h`, `3 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"

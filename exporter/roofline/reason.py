"""The one closed list of reasons why a probe or a measurement gave no number.

A failure is a value here: measuring code returns a `Reason`, and every reason is counted under its own label.
"""

from enum import StrEnum


class Outcome(StrEnum):
    """What a reason means for the probe that met it."""

    FAILED = "failed"
    """The server could not be asked, or did not answer as llama-server does."""
    REJECTED = "rejected"
    """There was an answer, but it does not prove the batch or the timing."""
    SKIPPED = "skipped"
    """Nothing was asked of the server."""
    NOT_MEASURED = "not_measured"
    """A bandwidth or compute pass was not good enough to publish."""


class Reason(StrEnum):
    """Why there is no number; `outcome` groups the reasons by the counter that takes them."""

    UNREACHABLE = "unreachable"
    CERTIFICATE_REFUSED = "certificate_refused"
    TLS_FAILED = "tls_failed"
    TIMEOUT = "timeout"
    LOADING = "loading"
    UNAUTHORIZED = "unauthorized"
    NOT_LLAMA = "not_llama"
    HTTP_ERROR = "http_error"
    BAD_ANSWER = "bad_answer"
    SERVER_ERROR = "server_error"
    NOT_SUPPORTED = "not_supported"
    MODEL_NOT_NAMED = "model_not_named"
    UNKNOWN_MODEL = "unknown_model"
    MODEL_FAILED = "model_failed"
    API_KEY_UNREADABLE = "api_key_unreadable"

    STREAM_CUT = "stream_cut"
    FOREIGN_REQUEST = "foreign_request"
    NOT_TOGETHER = "not_together"
    SCATTERED_SLOTS = "scattered_slots"
    WRONG_LENGTH = "wrong_length"
    CACHED_PROMPT = "cached_prompt"
    GAVE_WAY = "gave_way"
    SPECULATIVE = "speculative"
    BAD_TIMINGS = "bad_timings"

    BUSY = "busy"
    SLEEPING = "sleeping"
    KEEPS_AWAKE = "keeps_awake"
    MODEL_UNLOADED = "model_unloaded"
    CACHE_IN_USE = "cache_in_use"
    SLOTS_IN_USE = "slots_in_use"
    TOO_FEW_SLOTS = "too_few_slots"
    CONTEXT_TOO_SMALL = "context_too_small"

    PREEMPTED = "preempted"
    THROTTLED = "throttled"
    MEMORY_PRESSURE = "memory_pressure"
    PAGE_FAULTS = "page_faults"
    IMBALANCED = "imbalanced"
    UNSTABLE = "unstable"
    CACHE_SUSPECT = "cache_suspect"
    INVALID_RESULT = "invalid_result"
    NO_MEMORY = "no_memory"
    NO_THREADS = "no_threads"
    CANCELLED = "cancelled"
    UNSUPPORTED = "unsupported"

    @property
    def outcome(self) -> Outcome:
        """The group that this reason is counted in."""
        return _OUTCOMES[self]


_OUTCOMES = {
    reason: outcome
    for outcome, first, last in (
        (Outcome.FAILED, Reason.UNREACHABLE, Reason.API_KEY_UNREADABLE),
        (Outcome.REJECTED, Reason.STREAM_CUT, Reason.BAD_TIMINGS),
        (Outcome.SKIPPED, Reason.BUSY, Reason.CONTEXT_TOO_SMALL),
        (Outcome.NOT_MEASURED, Reason.PREEMPTED, Reason.UNSUPPORTED),
    )
    for reason in list(Reason)[list(Reason).index(first) : list(Reason).index(last) + 1]
}

"""Everything that can be switched at the fake llama-server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import fake_llama_answers as answers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fake_llama_answers import Json

Fault = Literal["html", "html_ok", "redirect", "wrong_type", "garbage", "hang", "slow", "drop", "404", "500"]
Phase = Literal["before", "during", "after"]


@dataclass(frozen=True)
class Raw:
    """An answer byte for byte, after which the connection is closed, cut, or left open in silence.

    A number among the parts is a pause, seconds; `repeat` sends the parts over and over until the other side leaves.
    """

    parts: Sequence[bytes | float]
    then: Literal["close", "cut", "silence"] = "close"
    repeat: bool = False


@dataclass(frozen=True)
class Intruder:
    """A user's request that comes when our first stream has `at_token` tokens, generates some, and is gone again."""

    at_token: int
    tokens: int
    prompt: int = 20  # tokens


@dataclass
class RouterModel:
    """One model of a router. `status` is changed by whoever asks for more than the router may tell."""

    model: answers.Model
    status: str = "unloaded"  # loaded, sleeping, loading, downloading, downloaded
    failed: bool = False
    tells_meta: bool = True
    aliases: tuple[str, ...] = ()


@dataclass
class Behaviour:
    """Everything that can be switched. The defaults are a healthy, idle server with four slots."""

    # the machine
    step_seconds: Callable[[int], float] = lambda batch: 0.01 + 0.002 * batch
    prompt_seconds: float = 0.03  # of the batch that holds new prompts
    split_kv: bool = False  # slots that are not adjacent step one after another, as with an explicit --parallel
    real_time: bool = False
    # the server
    loading: bool = False
    sleeping: bool = False
    api_key: str | None = None
    api_prefix: str = ""
    models_public: bool = False  # before b10518 /models needed no key
    router: list[RouterModel] | None = None  # several models behind one address, instead of `model`
    generates: bool = True  # False: an embeddings-only server of a build that refuses completions
    slots_enabled: bool = True
    metrics_enabled: bool = True
    n_slots: int = 4
    n_ctx: int = 1024  # of one slot
    model: answers.Model = field(default_factory=answers.Model)
    build: str = "b11434-0123abc"
    # other people's requests: in which phases of our (last) completion they are there, and how many slots they hold
    foreign: frozenset[Phase] = frozenset()
    foreign_slots: int = 1
    foreign_prefilling: bool = False  # still at their prompts: busy, nothing decoded yet
    intruders: Sequence[Intruder] = ()  # within each of our completions
    # speculative decoding: accepted drafts of each verification step in turn, of `drafted`
    accepted: Sequence[int] = ()
    drafted: int = 4
    kv_cells: int | None = None  # a unified cache's whole size: streams that outgrow it together all fail
    # older builds
    meta: Literal["full", "old", "null", "missing"] = "full"
    next_token_as_object: bool = False
    old_rate: bool = False  # predicted_per_second counts the first token
    null_event: bool = True  # `data: null` comes first
    slot_state_int: bool = False  # before November 2024: `state`, 0 idle
    slots_with_text: bool = False  # before b6337: prompts in GET /slots
    slots_without: frozenset[str] = frozenset()  # fields that this build does not tell
    props_without: frozenset[str] = frozenset()
    timings_without: frozenset[str] = frozenset()
    per_token_timings: bool = True  # since b4240
    id_slot_wraps: bool = True  # since b7890; before, a slot number out of range waited for ever
    early_headers: bool = True  # since b9425 with the slot, before with the first token
    models_while_loading: bool = False  # b5380 to b7507: 200 without figures
    metrics_quoted: bool = False  # b7090 to b7190
    metrics_without: frozenset[str] = frozenset()
    # broken transports, by path; "*" is every path; "redirect STATUS URL" is one too
    faults: dict[str, Fault | Raw | str] = field(default_factory=dict)
    # completions that are not what was asked
    stop_after: int | None = None  # fewer tokens than n_predict
    stop_type: str = "limit"
    truncated: bool = False
    same_id_slot: bool = False
    one_at_a_time: bool = False  # the streams of one request do not overlap
    cache_n: int = 0
    timing_values: dict[str, Json] = field(
        default_factory=dict
    )  # put over every timings object: NaN, None, "x", draft_n
    drop_timings: bool = False
    # completions that break off, counted in events of the response
    cut_after: int | None = None  # the connection ends
    error_after: int | None = None  # an error event in a 200 stream
    hang_after: int | None = None
    garbage_after: int | None = None
    pings: bool = False  # a comment line before every event

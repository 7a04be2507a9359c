"""The fake server as it was before and after each change that matters, from b4080 (November 2024) to b11434.

Each profile is what `Behaviour` says of that build; the changes are those of the fact sheet, tried on no running server
but the last.
"""

from __future__ import annotations

from typing import Any

from fake_llama_behaviour import Behaviour

_ALL_SLOT_FIELDS = frozenset({"n_prompt_tokens", "n_prompt_tokens_processed", "n_prompt_tokens_cache"})
_SPECULATIVE = frozenset(f"spec_decode_num_{name}_total" for name in ("draft_tokens", "accepted_tokens", "drafts"))

# What a build lacks, newest first: everything that came after it.
_B11433: dict[str, Any] = {}
_B10517 = _B11433 | {"models_public": True}  # b10518: /models wants the key
_B10405 = _B10517 | {"old_rate": True, "metrics_without": frozenset({"prompt_tokens_cached_total"})}
_B10281 = _B10405 | {"metrics_without": frozenset({"prompt_tokens_cached_total"}) | _SPECULATIVE}
_B9859 = _B10281 | {"meta": "old", "props_without": frozenset({"model_ftype"})}
_B9424 = _B9859 | {"early_headers": False, "null_event": False}
_B9275 = _B9424 | {"slots_without": _ALL_SLOT_FIELDS}
_B7889 = _B9275 | {"id_slot_wraps": False}
_B7507 = _B7889 | {"models_while_loading": True}
_B7491 = _B7507 | {"props_without": frozenset({"model_ftype", "is_sleeping"})}
_B7190 = _B7491 | {"metrics_quoted": True}
_B7089 = _B7190 | {"metrics_quoted": False}
_B6722 = _B7089 | {"next_token_as_object": True}
_B6398 = _B6722 | {"timings_without": frozenset({"cache_n"})}
_B6336 = _B6398 | {
    "slots_enabled": False,
    "props_without": frozenset({"model_ftype", "is_sleeping", "endpoint_slots", "endpoint_props", "endpoint_metrics"}),
}
_B6336_SLOTS = _B6336 | {"slots_enabled": True, "slots_with_text": True}
_B5379 = _B6336_SLOTS | {"models_while_loading": False}
_B4284 = _B5379 | {
    "props_without": _B6336["props_without"] | {"model_path", "build_info", "modalities"},
    "slots_without": _ALL_SLOT_FIELDS | {"id_task"},
}
_B4239 = _B4284 | {"per_token_timings": False}
_B4080 = _B4239 | {"slot_state_int": True}

BUILDS: dict[str, dict[str, Any]] = {
    "b11434": _B11433,
    "b10517": _B10517,
    "b10405": _B10405,
    "b10281": _B10281,
    "b9859": _B9859,
    "b9424": _B9424,
    "b9275": _B9275,
    "b7889": _B7889,
    "b7507": _B7507,
    "b7491": _B7491,
    "b7190": _B7190,
    "b7089": _B7089,
    "b6722": _B6722,
    "b6398": _B6398,
    "b6336": _B6336,
    "b6336 --slots": _B6336_SLOTS,
    "b5379 --slots": _B5379,
    "b4284 --slots": _B4284,
    "b4239 --slots": _B4239,
    "b4080 --slots": _B4080,
}


def behaviour_of(build: str, **changes: Any) -> Behaviour:
    """A healthy server of that build, with some changes."""
    return Behaviour(**{"build": f"{build.split(maxsplit=1)[0]}-0123abc", **BUILDS[build], **changes})

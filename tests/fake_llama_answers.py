"""What the fake llama-server says: bodies shaped after recorded answers of llama.cpp b11434 (October 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from fake_llama_behaviour import Behaviour, RouterModel

Json: TypeAlias = dict[str, Any] | list[Any] | str | float | int | bool | None


@dataclass(frozen=True)
class Model:
    """The loaded model as the server describes it; the defaults are gemma-3-270m."""

    alias: str = "tiny"
    path: str = "/models/gemma-3-270m-q4_k_m.gguf"
    ftype: str = "Q4_K - Medium"
    n_params: int = 268_098_176
    size: int = 246_587_904
    n_vocab: int = 262_144
    n_embd: int = 640
    n_ctx_train: int = 32_768


def error(status: int, kind: str, message: str, **more: int) -> dict[str, Json]:
    """The one shape of every error body."""
    return {"error": {"code": status, "message": message, "type": kind, **more}}


MEDIA_MARKER = "<__media_K6Ej3fDT9sTI8j2na87h2uGytteKsTgW__>"  # another one at each start

LOADING = error(503, "unavailable_error", "Loading model")
NO_SLOT = error(503, "unavailable_error", "no slot available")
UNAUTHORIZED = error(401, "authentication_error", "Invalid API Key")
CACHE_FULL = error(500, "server_error", "Context size has been exceeded.")
NO_COMPLETIONS = error(
    501, "not_supported_error", "This server does not support completions. Start it without `--embeddings`"
)
ROUTER_NO_NAME = error(400, "invalid_request_error", "model name is missing from the request")
ROUTER_UNLOADED = error(400, "invalid_request_error", "model is not loaded")
ROUTER_UNKNOWN = error(400, "invalid_request_error", "model not found")
NOT_FOUND = error(404, "not_found_error", "File Not Found")


def not_supported(endpoint: str) -> dict[str, Json]:
    text = f"This server does not support {endpoint} endpoint. Start it with `--{endpoint}`"
    return error(501, "not_supported_error", text)


def params(request: Mapping[str, Any] | None = None) -> dict[str, Json]:
    """The sampling parameters as /props (no request) and /slots show them."""
    asked = request or {}
    n_predict = asked.get("n_predict", -1)
    return {
        "seed": asked.get("seed", 4294967295),
        "temperature": float(asked.get("temperature", 0.8)),
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": asked.get("top_k", 40),
        "top_p": 0.95,
        "min_p": 0.05,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "typical_p": 1.0,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 64,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": bool(asked.get("ignore_eos", False)),
        "stream": bool(asked.get("stream", False)),
        "n_probs": 0,
        "min_keep": 0,
        "chat_format": "Content-only",
        "reasoning_format": "none" if request is None else "deepseek",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": asked.get(
            "samplers", ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
        ),
        "speculative.types": "none",
        "timings_per_token": bool(asked.get("timings_per_token", False)),
        "post_sampling_probs": False,
        "backend_sampling": False,
        "lora": [],
    }


def generation_settings(request: Mapping[str, Any]) -> dict[str, Json]:
    """The echo in the last event of a completion: the parameters and what belongs to this request alone."""
    return {
        **params(request),
        "dry_sequence_breakers": ["\n", ":", '"', "*"],
        "stop": [],
        "logit_bias": [{"bias": None, "token": 1}] if request.get("ignore_eos") else [],
        "grammar": "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
    }


def props(
    model: Model, *, n_slots: int, n_ctx: int, slots: bool, metrics: bool, sleeping: bool, build: str
) -> dict[str, Json]:
    return {
        "default_generation_settings": {"params": params(), "n_ctx": n_ctx},
        "total_slots": n_slots,
        "model_alias": model.alias,
        "model_ftype": model.ftype,
        "model_path": model.path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": MEDIA_MARKER,
        "endpoint_slots": slots,
        "endpoint_props": False,
        "endpoint_metrics": metrics,
        "ui": True,
        "ui_settings": {},
        "chat_template": "{%- for message in messages -%}\n{%- endfor -%}",
        "chat_template_caps": {"supports_string_content": True, "supports_tools": False},
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "build_info": build,
        "is_sleeping": sleeping,
        "cors_proxy_enabled": False,
    }


def model_meta(model: Model, *, n_ctx: int) -> dict[str, Json]:
    return {
        "vocab_type": 1,
        "n_vocab": model.n_vocab,
        "n_ctx": n_ctx,
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.n_embd,
        "n_params": model.n_params,
        "size": model.size,
        "ftype": model.ftype,
    }


def models(model: Model, *, n_ctx: int, meta: Literal["full", "old", "null", "missing"]) -> dict[str, Json]:
    """GET /v1/models; `old` is the meta of builds before 2026, without n_ctx and ftype."""
    entry: dict[str, Json] = {
        "id": model.alias,
        "aliases": [model.alias],
        "tags": [],
        "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "created": 1796041388,
        "owned_by": "llamacpp",
    }
    if meta != "missing":
        facts = model_meta(model, n_ctx=n_ctx)
        if meta == "old":
            del facts["n_ctx"], facts["ftype"]
        entry["meta"] = None if meta == "null" else facts
    listed: dict[str, Json] = {"name": model.alias, "model": model.alias, "type": "model", "tags": [""]}
    listed["capabilities"] = ["completion"]
    listed |= dict.fromkeys(("modified_at", "size", "digest", "description", "parameters"), "")
    details: dict[str, Json] = {
        "parent_model": "",
        "format": "gguf",
        "family": "",
        "families": [""],
        "parameter_size": "",
    }
    listed["details"] = {**details, "quantization_level": ""}
    return {"models": [listed], "object": "list", "data": [entry]}


def router_props(*, build: str) -> dict[str, Json]:
    """GET /props of a router that is not asked for a model."""
    return {
        "role": "router",
        "max_instances": 4,
        "models_autoload": True,
        "model_alias": "llama-server",
        "model_path": "none",
        "default_generation_settings": {"params": None, "n_ctx": 0},
        "ui_settings": {},
        "build_info": build,
        "cors_proxy_enabled": False,
    }


def router_model(entry: RouterModel, *, n_ctx: int) -> dict[str, Json]:
    """One entry of a router's GET /models; the running child's figures are merged in, if they have come yet."""
    model = entry.model
    arguments = ["/usr/local/bin/llama-server", "--host", "127.0.0.1", "--port", "0", "--alias", model.alias]
    status: dict[str, Json] = {"value": entry.status, "args": arguments, "preset": f"[{model.alias}]\nmetrics = 1\n\n"}
    if entry.failed:
        status |= {"failed": True, "exit_code": 1}
    answer: dict[str, Json] = {
        "id": model.alias,
        "aliases": list(entry.aliases),
        "tags": [],
        "object": "model",
        "owned_by": "llamacpp",
        "created": 1796041466,
        "status": status,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "source": "models_dir",
        "can_remove": False,
    }
    running = entry.status in ("loaded", "sleeping")
    return answer | ({"meta": model_meta(model, n_ctx=n_ctx)} if running and entry.tells_meta else {})


def router_models(entries: Sequence[Json]) -> dict[str, Json]:
    return {"data": list(entries), "object": "list"}


@dataclass
class SlotView:
    """What one slot shows: the fields after `busy` mean something only if it ever had a task."""

    id: int
    busy: bool = False
    id_task: int | None = None
    n_prompt_tokens: int = 0
    n_processed: int = 0
    n_remain: int = -1
    n_decoded: int = 0
    request: Mapping[str, Any] | None = None


def slot(view: SlotView, now: Behaviour) -> dict[str, Json]:
    """One slot of GET /slots."""
    answer: dict[str, Json] = {"id": view.id, "n_ctx": now.n_ctx, "speculative": bool(now.accepted)}
    answer |= {"state": int(view.busy)} if now.slot_state_int else {"is_processing": view.busy}
    if view.id_task is not None:
        token: dict[str, Json] = {"has_next_token": view.busy, "has_new_line": False}
        token |= {"n_remain": view.n_remain, "n_decoded": view.n_decoded}
        answer |= {
            "id_task": view.id_task,
            "n_prompt_tokens": view.n_prompt_tokens,
            "n_prompt_tokens_processed": view.n_processed,
            "n_prompt_tokens_cache": 0,
            "params": params(view.request or {}),
            "next_token": token if now.next_token_as_object else [token],
        }
        if now.slots_with_text:
            answer["prompt"] = 'a "user\'s" text, [with] {commas}, ' * 40
    return {key: value for key, value in answer.items() if key not in now.slots_without}


def timings(
    *, prompt_n: int, prompt_seconds: float, predicted_n: int, predicted_seconds: float, cache_n: int, old_rate: bool
) -> dict[str, Json]:
    """The timings object; `old_rate` divides by predicted_n, as builds before b10406 did, not by the steps."""
    prompt_ms = prompt_seconds * 1e3
    predicted_ms = max(predicted_seconds * 1e3, 0.001)
    steps = predicted_n if old_rate else predicted_n - 1
    return {
        "cache_n": cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": prompt_n / prompt_ms * 1e3 if prompt_ms else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
        "predicted_per_second": steps / predicted_ms * 1e3,
    }


METRICS: Sequence[tuple[str, str, str]] = (
    ("prompt_tokens_total", "counter", "Number of prompt tokens processed, excluding cached tokens"),
    ("prompt_tokens_cached_total", "counter", "Number of prompt tokens reused from the cache"),
    ("prompt_seconds_total", "counter", "Total time spent processing prompts"),
    ("tokens_predicted_total", "counter", "Number of generation tokens processed"),
    ("tokens_predicted_seconds_total", "counter", "Total time spent generating tokens"),
    ("n_decode_total", "counter", "Total number of llama_decode() calls"),
    ("n_tokens_max", "counter", "Largest observed sequence length (prompt + generation)"),
    ("spec_decode_num_draft_tokens_total", "counter", "Speculative: Total draft tokens generated"),
    ("spec_decode_num_accepted_tokens_total", "counter", "Speculative: Total draft tokens accepted"),
    ("spec_decode_num_drafts_total", "counter", "Speculative: Total speculative decoding verification steps"),
    ("prompt_tokens_seconds", "gauge", "Average prompt throughput in tokens/s"),
    ("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s"),
    ("requests_processing", "gauge", "Number of requests processing"),
    ("requests_deferred", "gauge", "Number of requests deferred"),
    ("n_busy_slots_per_decode", "gauge", "Average number of busy slots per llama_decode() call"),
)


def metrics(values: Mapping[str, float], *, without: Collection[str] = ()) -> str:
    """The Prometheus text with the server's six significant digits."""
    lines: list[str] = []
    for name, kind, text in METRICS:
        if name in without:
            continue
        lines += [f"# HELP llamacpp:{name} {text}", f"# TYPE llamacpp:{name} {kind}"]
        lines.append(f"llamacpp:{name} {values.get(name, 0):.6g}")
    return "\n".join(lines) + "\n"

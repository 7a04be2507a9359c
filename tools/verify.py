#!/usr/bin/env python3
"""Recomputes every derived figure of a report from its raw measurements, and tells each that differs.

    roofline-exporter report --format json | tools/verify.py -
    curl -s http://127.0.0.1:10470/api/v1/snapshot | tools/verify.py -

It shares no code with the exporter on purpose: an error would have to be made twice. A figure that it does not know is
an error too, so that a new one cannot be published unchecked. Exit status 0: all agree; 1: some differ; 2: no report.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import isclose, isfinite
from pathlib import Path
from typing import Any

RELATIVE, ABSOLUTE = 1e-6, 1e-12
"""What rounding may do to a figure."""

UNEVEN, NARROW = 0.25, 0.03
"""A spread of single steps above which a sample is disturbed, and how near rates repeat."""

Figures = dict[str, Any]
"""By their place in the document, as in `batches.0.decode_step_seconds`."""

RAW = re.compile(
    r"""(
    (cpus|last_level_cache_bytes|memory_bytes)
    | memory_bandwidth_(array_bytes|last_success_timestamp_seconds|runs_total)
    | memory_bandwidth\.\d+\.(best_bytes_per_second|median_bytes_per_second|thread_count|array_bytes|passes)
    | compute\.\d+\.(flops_per_second|spread_ratio|thread_count)
    | model\.(parameters|weight_bytes|file_mismatch)
    | prefill\.(tokens|seconds|contended)
    | footprint\.((parameters|weight_bytes|head_bytes|state_bytes|head_parameters)
        | experts\.\d+\.(layers|bytes|parameters|count|used)
        | attention\.\d+\.(layers|kv_bytes_per_token|flops_per_token|window_tokens))
    | ceilings\.\d+\.(bytes_per_second|peak_fraction_ratio)
    | server_slots | server_compute_peak_flops_per_second\.\w+
    | live_(streams|tokens_per_second|step_seconds)
    | live\.shares\.\d+\.(streams|seconds|tokens|steps|depth_tokens)
    | probes_total | probe_interval_seconds | probe(s_skipped|s_rejected|_failures)_total\.\w+
    | batches\.\d+\.(batch|depth_tokens|steps|decode_step_seconds|decode_step_spread_ratio|decode_contended
        | decode_floor_ratio_threshold|decode_below_threshold_samples
        | decode_speculative_tokens_per_step
        | probe_success|probe_duration_seconds|probe_last_success_timestamp_seconds)
    )""",
    re.VERBOSE,
)
"""What was measured, counted or configured: nothing to recompute it from."""


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar with its place; `null` says that nothing is known and is no figure."""
    if isinstance(value, dict):
        inner = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        inner = [(str(number), item) for number, item in enumerate(value)]
    else:
        if value is not None:
            yield place, value
        return
    for key, item in inner:
        yield from leaves(item, f"{place}.{key}" if place else key)


def host_figures(host: Mapping[str, Any]) -> Figures:
    """The machine's derived figures: the spread of each kernel's passes."""
    return {
        f"memory_bandwidth.{number}.spread_ratio": m["best_bytes_per_second"] / m["median_bytes_per_second"] - 1
        for number, m in enumerate(host["memory_bandwidth"])
    }


class Server:
    """One server of the report, and its figures derived anew."""

    def __init__(self, host: Mapping[str, Any], server: Mapping[str, Any]) -> None:
        self.host, self.server, self.footprint = host, server, server["footprint"]
        self.ceilings: dict[str, float] = {c["ceiling"]: c["bytes_per_second"] for c in server["ceilings"]}
        self.reference = self.ceilings.get(server["reference"])
        self.hard = self.ceilings.get("read") or self.ceilings.get("peak")
        self.peak = next(iter(server.get("server_compute_peak_flops_per_second", {}).values()), None)
        self.ridge = self.peak / self.reference if self.peak and self.reference else None
        self.measured = {b["batch"]: b for b in server["batches"] if "decode_step_seconds" in b}

    def figures(self) -> Figures:
        """All derived figures of the server, where they belong in its object."""
        found: Figures = {"server_up": int(self.server["state"] in {"ready", "busy", "sleeping"})}
        if self.ridge:
            found["ridge_flops_per_byte"] = self.ridge
        found.update(self._sources())
        found.update(self._live())
        for number, batch in enumerate(self.server["batches"]):
            found.update({f"batches.{number}.{name}": value for name, value in self._batch(batch).items()})
        found.update({f"verdict.{name}": value for name, value in self._verdict().items()})
        found.update({f"prefill.{name}": value for name, value in self._prefill().items()})
        return found

    def _sources(self) -> Figures:
        """What is published twice must agree: ceilings with the host's, the server's own bytes with the footprint's."""
        found: Figures = {}
        kernels = {m["kernel"]: m for m in self.host["memory_bandwidth"] if m["threads"] == "all"}
        for number, ceiling in enumerate(self.server["ceilings"]):
            source, place = ceiling["ceiling"], f"ceilings.{number}"
            found[f"{place}.reference"] = source == self.server["reference"]
            if source in {"triad", "read"}:
                found[f"{place}.bytes_per_second"] = kernels[source]["best_bytes_per_second"]
            if source == "sustained":
                found[f"{place}.bytes_per_second"] = self.ceilings["peak"] * ceiling["peak_fraction_ratio"]
        if "measured" in self.server.get("server_compute_peak_flops_per_second", {}):
            peak = self.host["compute"][0]["flops_per_second"]
            found["server_compute_peak_flops_per_second.measured"] = peak
        if self.footprint is not None:
            if self.footprint["attention"] is not None:
                each = (a["layers"] * a["kv_bytes_per_token"] for a in self.footprint["attention"])
                found["model.kv_bytes_per_token"] = sum(each)
            if self.server["model"]["bytes_source"] == "server":
                found.update({f"footprint.{k}": self.server["model"][k] for k in ("parameters", "weight_bytes")})
        return found

    def _weights(self, streams: int) -> float:
        """Bytes of the weights that a step reads: of each routed expert, the odds that any of the streams calls it."""
        routed = (
            e["layers"] * e["bytes"] * (1 - ((e["count"] - e["used"]) / e["count"]) ** streams)
            for e in self.footprint["experts"]
        )
        return float(self.footprint["weight_bytes"] + sum(routed))

    def _cache(self, streams: int, depth: float) -> float | None:
        """Bytes of cache and state that a step reads; None when the layers are not known."""
        if (layers := self.footprint["attention"]) is None:
            return None
        seen = sum(a["layers"] * a["kv_bytes_per_token"] * self._seen(a, depth) for a in layers)
        return float(streams * (seen + (self.footprint["state_bytes"] or 0)))

    def _flops(self, streams: int, depth: float) -> float:
        multiplied = self.footprint["parameters"] + sum(
            e["layers"] * e["parameters"] / e["count"] * e["used"] for e in self.footprint["experts"]
        )
        layers = self.footprint["attention"] or []
        attended = sum(a["layers"] * a["flops_per_token"] * self._seen(a, depth) for a in layers)
        return float(streams * (multiplied + multiplied + attended))

    @staticmethod
    def _seen(attention: Mapping[str, Any], depth: float) -> float:
        window = attention["window_tokens"]
        return depth if window is None or depth < window else window

    def _batch(self, batch: Mapping[str, Any]) -> Figures:
        streams, seconds, depth = batch["batch"], batch.get("decode_step_seconds"), batch.get("depth_tokens", 0)
        # A server that drafts tokens gives several a step.
        per_step = batch.get("decode_speculative_tokens_per_step", 1)
        found: Figures = {}
        if seconds is not None:
            found["decode_tokens_per_second"] = streams * per_step / seconds
            smaller = [b for b in self.measured if b < streams]
            if smaller:
                before = self.measured[max(smaller)]
                added = seconds - before["decode_step_seconds"]
                found["decode_marginal_stream_seconds"] = added / (streams - before["batch"])
        if self.footprint is None:
            return found
        weights, cache = self._weights(streams), self._cache(streams, depth)
        read = weights + (cache or 0)
        found["model_step_bytes"] = read
        if seconds is None:
            return found
        flops, per_token = self._flops(streams, depth), self._weights(1) * streams * per_step / seconds
        implausible = self.hard is not None and read > 1.05 * self.hard * seconds
        found |= {
            "decode_step_bytes_per_second": read / seconds,
            "decode_token_read_bytes_per_second": per_token,
            "decode_intensity_flops_per_byte": flops / read,
            "decode_flops_per_second": flops / seconds,
        }
        if self.hard is not None:
            found["decode_implausible"] = int(implausible)
        if implausible:
            # A ceiling or the bytes are wrong: nothing that rests on both is published.
            return found
        for source, ceiling in self.ceilings.items():
            least = max(read / ceiling, flops / self.peak) if self.peak else read / ceiling
            found[f"decode_attainable_tokens_per_second.{source}"] = streams * per_step / least
            found[f"decode_ceiling_ratio.{source}"] = read / (ceiling * seconds)
            found[f"decode_token_read_ratio.{source}"] = per_token / ceiling
        if self.reference:
            found["decode_floor_seconds"] = read / self.reference
            found["decode_floor_ratio"] = read / (self.reference * seconds)
            found |= self._budget(weights, cache, self.reference, seconds)
        return found

    def _budget(self, weights: float, cache: float | None, ceiling: float, seconds: float) -> Figures:
        """The step by part; one that read faster than the ceiling read at its own rate all the time."""
        head = self.footprint["head_bytes"]
        parts = {"weights": weights - (head or 0), "output_head": head, "kv_cache": cache}
        rate = max(ceiling, (weights + (cache or 0)) / seconds)
        spent = {name: size / rate for name, size in parts.items() if size is not None}
        spent["overhead"] = max(0.0, seconds - sum(spent.values()))
        return {f"decode_budget_seconds.{name}": value for name, value in spent.items()}

    def _live(self) -> Figures:
        """Users' traffic, from what it is the mean of; the server's own counters leave nothing to recompute."""
        live = self.server.get("live")
        if live is None or not (shares := live["shares"]):
            return {}
        seconds = sum(s["seconds"] for s in shares)
        found: Figures = {
            "live_streams": sum(s["streams"] * s["seconds"] for s in shares) / seconds,
            "live_tokens_per_second": sum(s["tokens"] for s in shares) / seconds,
        }
        if any(s["steps"] is None for s in shares):
            return found
        found["live_step_seconds"] = seconds / sum(s["steps"] for s in shares)
        if self.footprint is None or not self.reference or any(s["depth_tokens"] is None for s in shares):
            return found
        read = sum(
            s["steps"] * (self._weights(s["streams"]) + (self._cache(s["streams"], s["depth_tokens"]) or 0))
            for s in shares
        )
        if self.hard is None or read <= 1.05 * self.hard * seconds:
            found["live_floor_ratio"] = read / (self.reference * seconds)
        return found

    def _prefill(self) -> Figures:
        """The long prompt: every token but the last skips the head, and sees itself and those before it."""
        prompt = self.server.get("prefill", {})
        if "seconds" not in prompt:
            return {}
        tokens, seconds = prompt["tokens"], prompt["seconds"]
        found: Figures = {"tokens_per_second": tokens / seconds}
        if self.footprint is None or (head := self.footprint["head_parameters"]) is None:
            return found
        flops = sum(self._flops(1, place) for place in range(1, tokens + 1)) - 2 * head * (tokens - 1)
        read = self._weights(tokens)
        found |= {
            "flops": flops,
            "bytes": read,
            "intensity_flops_per_byte": flops / read,
            "flops_per_second": flops / seconds,
            "bytes_per_second": read / seconds,
        }
        if self.peak:
            found["compute_ratio"] = flops / (seconds * self.peak)
        if self.ridge:
            found["above_ridge"] = flops / read > self.ridge
        return found

    def _verdict(self) -> Figures:
        """The verdict's evidence and predictions; `bound` is a set where rounding could tip it either way."""
        derived = {streams: {**batch, **self._batch(batch)} for streams, batch in self.measured.items()}
        if not derived:
            return {"bound": {"unknown"}}
        largest, one = max(derived), derived.get(1, {})
        ratio, growth = one.get("decode_floor_ratio"), None
        evidence: Figures = {"largest_batch": largest, "floor_ratio": ratio}
        share = gain = doubt = None
        if one and largest > 1:
            slower = derived[largest]["decode_step_seconds"] / one["decode_step_seconds"]
            growth = (slower - 1) / (largest - 1)
            gain = derived[largest]["decode_tokens_per_second"] / one["decode_tokens_per_second"]
            doubt = disturbed(one) or disturbed(derived[largest]) or faster(one, derived[largest])
            if self.peak and self.footprint is not None:
                share = derived[largest]["decode_flops_per_second"] / self.peak
        above = [b["decode_step_bytes_per_second"] for b in derived.values() if b.get("decode_implausible")]
        intensities = {b: v["decode_intensity_flops_per_byte"] for b, v in derived.items() if self.footprint}
        crossed = [b for b, intensity in intensities.items() if self.ridge and intensity > self.ridge]
        evidence |= {
            "growth_ratio": growth,
            "compute_ratio": share,
            "above_ceiling_ratio": max(above) / self.hard if above and self.hard else None,
            "ridge_crossed_at_batch": min(crossed, default=None),
            "doubt": doubt,
        }
        found: Figures = {f"evidence.{name}": value for name, value in evidence.items() if value is not None}
        nudges, trusted = (-1e-9, 0, 1e-9), None if doubt else growth
        found["bound"] = {"above-ceiling"} if above else {bound_of(ratio, trusted, share, nudge) for nudge in nudges}
        judged = [
            ("intensity_below_ridge", "intensity_flops_per_byte", intensities.get(1), self.ridge, -1),
            ("single_stream_above_40_percent", "floor_ratio", ratio, 0.4, 1),
            ("batching_raises_throughput", "tokens_per_second_ratio", None if doubt else gain, 1.0, 1),
        ]
        if ratio is not None and ratio <= judged[1][3] and disturbed(one):
            # A disturbed sample is no proof of too little.
            judged[1] = (*judged[1][:2], None, *judged[1][3:])
        known = [(name, of, v, limit, way) for name, of, v, limit, way in judged if v is not None and limit is not None]
        for number, (name, of, value, limit, way) in enumerate(known):
            place = f"predictions.{number}"
            found |= {f"{place}.prediction": name, f"{place}.{of}": value, f"{place}.limit_{of}": limit}
            found[f"{place}.holds"] = way * value > way * limit
            found[f"{place}.narrow"] = 0.97 * limit < value < 1.03 * limit
        return found


def disturbed(batch: Mapping[str, Any]) -> str | None:
    """Whether others wanted the processors, or the steps differ widely."""
    if batch["decode_contended"]:
        return "contended"
    return "uneven" if batch["decode_step_spread_ratio"] > UNEVEN else None


def faster(one: Mapping[str, Any], most: Mapping[str, Any]) -> str | None:
    """Whether more streams took less time a step than one, by more than both spreads (3 % at least) explain."""
    allowed = sum(max(b["decode_step_spread_ratio"], NARROW) * b["decode_step_seconds"] for b in (one, most))
    gained = one["decode_step_seconds"] - most["decode_step_seconds"]
    return "faster_together" if gained > allowed else None


def bound_of(ratio: float | None, growth: float | None, share: float | None, nudge: float) -> str:
    """The rule of docs/verdict.md, with every threshold moved by `nudge`."""
    if ratio is not None and ratio >= 0.65 + nudge:
        return "bandwidth-bound"
    if ratio is None or growth is None:
        return "unknown"
    if growth >= 0.5 + nudge:
        return "compute-bound"
    idle = share is not None and share <= 0.1 - nudge
    return "overhead-bound" if growth <= 0.2 - nudge or idle else "unknown"


def agrees(published: Any, derived: Any) -> bool:
    """Whether they are the same figure but for rounding, or the same word."""
    if isinstance(derived, set):
        return published in derived
    if isinstance(derived, str) or isinstance(published, str):
        return bool(published == derived)
    return isclose(published, derived, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def compare(about: str, document: Mapping[str, Any], derived: Figures) -> tuple[int, list[str]]:
    """How many figures of the object were checked, and a line for each that is wrong, unknown or missing."""
    published, wrong = dict(leaves(document)), []
    for place, value in published.items():
        where = f"{about}{place}"
        if (batch := re.match(r"batches\.(\d+)\.(.+)", place)) is not None:
            where = f"{about}batch {document['batches'][int(batch[1])]['batch']}: {batch[2]}"
        if place in derived:
            if not agrees(value, derived[place]):
                wrong.append(f"{where}: published {value}, recomputed {derived[place]}")
        elif not isinstance(value, str) and not RAW.fullmatch(place):
            wrong.append(f"{where}: published {value}, but verify.py does not know how to recompute it")
    # A value that is no finite number is not published.
    due = (place for place, value in derived.items() if not isinstance(value, float) or isfinite(value))
    wrong += [f"{about}{place}: not published, recomputed {derived[place]}" for place in due if place not in published]
    return len(published.keys() & derived.keys()), wrong


def verify(document: Mapping[str, Any]) -> tuple[int, list[str]]:
    """How many derived figures were checked, and a line for each difference."""
    host = document["host"]
    checked, wrong = compare("host: ", host, host_figures(host))
    for server in document["servers"]:
        count, lines = compare(f"{server['server']}: ", server, Server(host, server).figures())
        checked, wrong = checked + count, wrong + lines
    return checked, wrong


def main(arguments: Sequence[str]) -> int:
    """Verifies the report in the file, or on standard input for `-`."""
    if len(arguments) != 1:
        print("usage: verify.py REPORT.json", file=sys.stderr)
        return 2
    try:
        text = sys.stdin.read() if arguments[0] == "-" else Path(arguments[0]).read_text(encoding="utf-8")
        checked, wrong = verify(json.loads(text))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        print(f"{arguments[0]}: not a report: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for line in wrong:
        print(line)
    print(f"{checked} derived figures checked, {len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

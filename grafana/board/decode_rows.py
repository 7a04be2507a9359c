"""The decode dashboard's rows over time: against the floor, the two numbers, the batches, the machine's bandwidth."""

from typing import Final

from board.decode_scope import BATCH_LEGEND, BATCHES, HOST, SERVER, by_batch
from board.layout import Line, Row, even
from board.panels import TOKENS_PER_SECOND, counts, dashed, fixed, override, query, timeseries
from board.promql import RATE, happened, largest
from board.tables import Column, table

PARTS: Final = {"weights": "blue", "output_head": "purple", "kv_cache": "green", "overhead": "orange"}


def floor_row() -> Row:
    """The floor ratio against its threshold, and the budget of a step."""

    def part(name: str) -> str:
        return largest(SERVER("decode_budget_seconds", f'{BATCHES}, part="{name}"'), "part")

    ratio = timeseries(
        "Floor ratio against its threshold",
        "Floor / measured step time by batch; dashed, the ratio below which the operator wants to be told. An"
        " implausible sample has none.",
        [
            query(by_batch("decode_floor_ratio"), BATCH_LEGEND),
            query(by_batch("decode_floor_ratio_threshold"), "Threshold of batch {{batch}}"),
        ],
        unit="percentunit",
        overrides=[dashed("B")],
    )
    budget = timeseries(
        "Token budget: where a step of batch $batch goes",
        "The time of a step, in which every stream gets one token, by part: weights, output head and KV cache at the"
        " reference ceiling, overhead the rest. A step that is faster than the reference has no overhead, and its parts"
        " share it by their bytes; of an implausible sample the budget is withheld.",
        [query(part(name), "{{part}}") for name in PARTS],
        unit="s",
        stacked=True,
        overrides=[override("byName", name, color=fixed(colour)) for name, colour in PARTS.items()],
        more={"repeat": "batch", "repeatDirection": "h", "maxPerRow": 4},
    )
    return Row("Decode against its floor", [even(9, ratio), even(9, budget)])


def two_numbers_row() -> Row:
    """Achieved against the streaming floor, and per step against per token read."""
    rate = by_batch("decode_tokens_per_second")
    floor = timeseries(
        "Streaming floor and achieved rate",
        "Tokens per second of all streams: measured, and dashed what the floor would give, which is measured / ratio.",
        [
            query(rate, BATCH_LEGEND),
            query(f"{rate} / {by_batch('decode_floor_ratio')}", "Floor of batch {{batch}}"),
        ],
        unit=TOKENS_PER_SECOND,
        overrides=[dashed("B")],
    )
    read = timeseries(
        "Per step and per token read",
        "Per step is physical: the bytes that a step moves / its time. Per token read is bookkeeping: weight bytes x"
        " tokens/s. They part as the batch grows, for streams share one weight read. Dashed, the server's ceilings.",
        [
            query(by_batch("decode_step_bytes_per_second"), "Per step, batch {{batch}}"),
            query(by_batch("decode_token_read_bytes_per_second"), "Per token read, batch {{batch}}"),
            query(largest(SERVER("ceiling_bytes_per_second"), "ceiling"), "Ceiling: {{ceiling}}"),
        ],
        unit="Bps",
        overrides=[dashed("C")],
    )
    return Row("Two decode numbers", [even(9, floor, read)])


def batches_row() -> Row:
    """What the batch does to rate, step, cost and spread."""
    return Row(
        "By batch",
        [
            even(
                8,
                timeseries(
                    "Tokens/s by batch",
                    "Tokens per second of all streams of the batch together.",
                    [query(by_batch("decode_tokens_per_second"), BATCH_LEGEND)],
                    unit=TOKENS_PER_SECOND,
                ),
                timeseries(
                    "Step time",
                    "Time of a step, which gives every stream one token; dashed, its floor, withheld of an implausible"
                    " sample.",
                    [
                        query(by_batch("decode_step_seconds"), BATCH_LEGEND),
                        query(by_batch("decode_floor_seconds"), "Floor of batch {{batch}}"),
                    ],
                    unit="s",
                    overrides=[dashed("B")],
                ),
                timeseries(
                    "Cost of one more stream",
                    "What one more stream adds to a step, against the next smaller batch: next to nothing while the"
                    " weights are the limit.",
                    [query(by_batch("decode_marginal_stream_seconds"), BATCH_LEGEND)],
                    unit="s",
                ),
                timeseries(
                    "Spread of the steps",
                    "Interquartile range of the single step times / their median: how steadily the server decodes.",
                    [query(by_batch("decode_step_spread_ratio"), BATCH_LEGEND)],
                    unit="percentunit",
                ),
            )
        ],
    )


def bandwidth_row() -> Row:
    """The machine's ceilings, how they were measured, and how well the passes agree."""
    kernel = ("kernel", "threads")
    how = {"thread_count": "Threads", "store": "Store", "isa": "ISA", "pages": "Pages", "method": "Method"}
    everyone = 'threads="all"'
    speed = timeseries(
        "Bandwidth by kernel",
        "The newest measurement with all threads; dashed, the ceiling in force: the best of the last 24 hours.",
        [
            query(largest(HOST("memory_bandwidth_last_bytes_per_second", everyone), "kernel"), "{{kernel}}"),
            query(largest(HOST("memory_bandwidth_bytes_per_second", everyone), "kernel"), "{{kernel}} in force"),
        ],
        unit="Bps",
        overrides=[dashed("B")],
    )
    spread = timeseries(
        "Spread of the passes",
        "(Median - best) / best pass time of the newest measurement: 0 when all passes agree.",
        [query(largest(HOST("memory_bandwidth_spread_ratio"), *kernel), "{{kernel}}, {{threads}}")],
        unit="percentunit",
    )
    ceilings = table(
        "Ceilings in force",
        "Each ceiling and how it was measured.",
        {"kernel": "Kernel", "threads": "Thread scope", **how, "scope": "Measured in"},
        [
            Column("Bandwidth", largest(HOST("memory_bandwidth_bytes_per_second"), *kernel), "Bps"),
            Column("", largest(HOST("memory_bandwidth_info"), *kernel, *how, "scope")),
        ],
        descending=True,
    )
    rejected = counts(
        "Passes that were rejected",
        "Passes of the bandwidth and compute kernels that were not good enough to count, by reason.",
        query(happened(HOST("memory_bandwidth_rejected_passes_total"), RATE, "reason"), "{{reason}}"),
    )
    return Row("Memory bandwidth of the machine", [even(9, speed, spread), Line(8, [(16, ceilings), (8, rejected)])])

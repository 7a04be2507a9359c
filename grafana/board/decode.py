"""*Decode roofline*: one server on one machine, from the roof down to the reasons of a missing sample."""

from board.decode_health import exporter_row, freshness_row, live_row
from board.decode_rows import bandwidth_row, batches_row, floor_row, two_numbers_row
from board.decode_scope import BATCH_LEGEND, BATCHES, HOST, SERVER, by_batch
from board.layout import Line, Row, annotations, dashboard, even, outages, variable
from board.panels import FLOP_PER_BYTE, TOKENS_PER_SECOND, Json, fixed, now, override, stat, yes_no
from board.promql import DOWN, UP, Scope, age, largest, reference_ceiling
from board.roofline import roofline
from board.tables import BELOW, COLOURED, Column, table

UID = "roofline-decode"


def _now_row() -> Row:
    state = largest(SERVER("server_state"), "state")
    model = largest(SERVER("model_info"), "model", "quantization", "build")
    return Row(
        "",
        [
            even(
                4,
                stat(
                    "Server",
                    "What the server does now, as its health check tells.",
                    now(f"{state} == 1", "{{state}}"),
                    unit="none",
                    text="name",
                    overrides=[
                        override("byRegexp", UP, color=fixed("green")),
                        override("byRegexp", DOWN, color=fixed("red")),
                    ],
                ),
                stat(
                    "Model",
                    "The model that the server has loaded, its quantization, and the server's build.",
                    now(model, "{{model}} {{quantization}} ({{build}})"),
                    unit="none",
                    text="name",
                ),
                stat(
                    "Floor ratio",
                    "Floor / measured step time: 100 % is the best that the reference ceiling allows.",
                    now(by_batch("decode_floor_ratio"), BATCH_LEGEND),
                    unit="percentunit",
                    text="value_and_name",
                ),
                stat(
                    "Decode rate",
                    "Tokens per second of all streams of the batch together, from the last probe.",
                    now(by_batch("decode_tokens_per_second"), BATCH_LEGEND),
                    unit=TOKENS_PER_SECOND,
                    text="value_and_name",
                ),
                stat(
                    "Reference ceiling",
                    "The memory bandwidth that the floor uses: read or triad, measured here; peak, a spec sheet's;"
                    " sustained, an estimate.",
                    now(reference_ceiling(SERVER, "ceiling"), "{{ceiling}}"),
                    unit="Bps",
                    text="value_and_name",
                ),
                stat(
                    "Age of the last sample",
                    "Time since the last probe that gave a sample; the figures beside are that old.",
                    now(age(SERVER("probe_last_success_timestamp_seconds", BATCHES), "batch"), BATCH_LEGEND),
                    unit="s",
                    text="value_and_name",
                ),
            )
        ],
    )


def _points_table() -> Json:
    return table(
        "Operating points",
        "The points of the roofline in figures. A contended sample is true, and slow because others were at work; of an"
        " implausible one the ratios are withheld.",
        {"batch": "Batch"},
        [
            Column("Floor ratio", by_batch("decode_floor_ratio"), "percentunit"),
            Column("Tokens/s", by_batch("decode_tokens_per_second"), TOKENS_PER_SECOND),
            Column("Step", by_batch("decode_step_seconds"), "s"),
            Column("Intensity", by_batch("decode_intensity_flops_per_byte"), FLOP_PER_BYTE),
            Column("Compute rate", by_batch("decode_flops_per_second"), "flops"),
            Column("Step bytes", by_batch("model_step_bytes"), "decbytes"),
            Column("Threshold", by_batch("decode_floor_ratio_threshold"), "percentunit"),
            Column("Samples below threshold", by_batch("decode_below_threshold_samples"), settings=BELOW),
            Column("Contended", by_batch("decode_contended"), settings={"mappings": yes_no(yes="orange"), **COLOURED}),
            Column("Implausible", by_batch("decode_implausible"), settings={"mappings": yes_no(yes="red"), **COLOURED}),
        ],
        descending=True,
    )


def _ceilings_table() -> Json:
    def of(name: str) -> str:
        return largest(SERVER(name, BATCHES), "batch", "ceiling")

    return table(
        "Share of each ceiling",
        "Per step is physical: the bytes that a step moves. Per token read is bookkeeping: it credits a whole weight"
        " read to every token, and batching takes it above 100 %. Attainable is the rate that the roofline allows.",
        {"batch": "Batch", "ceiling": "Ceiling"},
        [
            Column("Per step", of("decode_ceiling_ratio"), "percentunit"),
            Column("Per token read", of("decode_token_read_ratio"), "percentunit"),
            Column("Attainable", of("decode_attainable_tokens_per_second"), TOKENS_PER_SECOND),
        ],
        descending=True,
    )


def _roofline_row() -> Row:
    chart = roofline(
        "Roofline of $server on $instance",
        "The roof is what the processor allows: the reference memory bandwidth x the intensity, flat at the compute"
        " peak where that is known; the square is the ridge. A point is a measured batch: its distance below the roof"
        " is what is lost. Hover for the model and the floor ratio. Needs Grafana 11.1 or newer.",
        SERVER,
        BATCHES,
    )
    return Row("Roofline", [even(16, chart), Line(8, [(14, _points_table()), (10, _ceilings_table())])])


def decode_roofline() -> Json:
    """The dashboard."""
    up = "server_up"
    return dashboard(
        UID,
        "Decode roofline",
        "How fast a llama.cpp server could decode on its machine, how fast it does, and where the rest of the time is.",
        variables=[
            variable("job", "Job", "job", Scope("")(up), many=True),
            variable("instance", "Instance", "instance", Scope('job=~"$job"')(up), many=False),
            variable("server", "Server", "server", HOST(up), many=False),
            variable("batch", "Batch", "batch", SERVER("probe_success"), many=True, numeric=True),
        ],
        marks=[*annotations(HOST, 'server=~"$server|"'), outages(SERVER)],
        rows=[
            _now_row(),
            _roofline_row(),
            floor_row(),
            two_numbers_row(),
            batches_row(),
            bandwidth_row(),
            live_row(),
            freshness_row(),
            exporter_row(),
        ],
    )

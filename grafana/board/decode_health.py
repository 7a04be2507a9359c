"""The decode dashboard's rows on what can be trusted: users' traffic, freshness, reasons, the exporter itself."""

from board.decode_scope import BATCH_LEGEND, BATCHES, HOST, SERVER, by_batch
from board.layout import Line, Row, even
from board.panels import (
    SLOW,
    TOKENS_PER_SECOND,
    Json,
    bargauge,
    counts,
    dashed,
    limits,
    now,
    query,
    stat,
    timeseries,
    yes_no,
)
from board.promql import RANGE, RATE, age, happened, label, largest

OUTCOMES = {"failed": "probe_failures_total", "rejected": "probes_rejected_total", "skipped": "probes_skipped_total"}


def live_row() -> Row:
    """What users get, beside what the probe measures."""

    def users(title: str, description: str, name: str, unit: str) -> Json:
        return timeseries(title, description, [query(largest(SERVER(name), "server"), "Users")], unit=unit)

    return Row(
        "Users' traffic",
        [
            even(
                8,
                users(
                    "Users' tokens/s", "Tokens per second that users get.", "live_tokens_per_second", TOKENS_PER_SECOND
                ),
                users("Users' streams", "Streams that generate for users.", "live_streams", "short"),
                users("Users' step time", "Time of a step while users are served.", "live_step_seconds", "s"),
                users(
                    "Users' floor ratio",
                    "Floor / step time while users are served: what the probe's floor ratio is for their traffic.",
                    "live_floor_ratio",
                    "percentunit",
                ),
            )
        ],
    )


def freshness_row() -> Row:
    """How old the figures are, and why there are none."""
    ages = timeseries(
        "Age of the last sample",
        "Time since the last probe that gave a sample, and since the ceilings were measured; dashed, the effective time"
        " between probes. Decode values are withdrawn after three of those.",
        [
            query(age(SERVER("probe_last_success_timestamp_seconds", BATCHES), "batch"), BATCH_LEGEND),
            query(largest(SERVER("probe_interval_seconds"), "server"), "Time between probes"),
            query(age(HOST("memory_bandwidth_last_success_timestamp_seconds"), "instance"), "Ceilings"),
        ],
        unit="s",
        overrides=[dashed("B")],
    )
    last = stat(
        "Did the last probe give a sample?",
        "The outcome of the last probe of each batch.",
        now(by_batch("probe_success"), BATCH_LEGEND),
        unit="none",
        text="value_and_name",
        defaults={"mappings": yes_no(no="orange")},
    )
    whole_range = [label(happened(SERVER(name), RANGE, "reason"), "outcome", o) for o, name in OUTCOMES.items()]
    totals = bargauge(
        "Probes without a sample, in this time range",
        "How often each reason was met in the chosen time range.",
        now(f"sort_desc({' or '.join(whole_range)})", "{{outcome}}: {{reason}}"),
        unit="short",
        defaults={"decimals": 0, "noValue": "none"},
    )
    return Row(
        "Freshness, and why there is no sample",
        [
            Line(8, [(10, ages), (4, last), (10, totals)]),
            even(
                8,
                *(
                    counts(
                        f"Probes {outcome}, by reason",
                        text,
                        query(happened(SERVER(OUTCOMES[outcome]), RATE, "reason"), "{{reason}}"),
                    )
                    for outcome, text in (
                        ("skipped", "Probes that were due and not made."),
                        ("failed", "Probes that the server did not answer as llama-server does."),
                        ("rejected", "Probes whose answer does not prove the batch or the timing."),
                    )
                ),
            ),
        ],
    )


def exporter_row() -> Row:
    """What the exporter costs, and whether it is well."""
    made = timeseries(
        "Probes made",
        "Decode probes per time step: succeeded, failed and rejected ones.",
        [query(f"sum by (server) (increase({SERVER('probes_total')}[{RATE}]))", "{{server}}")],
        unit="short",
        more=SLOW,
    )
    lasted = timeseries(
        "Duration of a probe",
        "How long the last probe of each batch took.",
        [query(by_batch("probe_duration_seconds"), BATCH_LEGEND)],
        unit="s",
    )
    duty = timeseries(
        "Duty cycle and CPU",
        "Share of the last hour spent probing, and processor time of the exporter, bandwidth measurements included.",
        [
            query(largest(HOST("probe_duty_cycle_ratio"), "instance"), "Probing"),
            query(f"max by (instance) (rate({HOST.of('process_cpu_seconds_total')}[{RATE}]))", "CPU of one core"),
        ],
        unit="percentunit",
        more=SLOW,
    )
    memory = timeseries(
        "Memory",
        "Resident memory of the exporter; the kernels' arrays are returned after each measurement.",
        [query(largest(HOST.of("process_resident_memory_bytes"), "instance"), "Resident")],
        unit="bytes",
    )
    version = stat(
        "Exporter",
        "The exporter's version and the Python that runs it.",
        now(
            largest(HOST("exporter_build_info"), "version", "python_version"), "{{version}} (Python {{python_version}})"
        ),
        unit="none",
        text="name",
    )
    config = stat(
        "Configuration in force is the file's",
        "Whether the last (re)load of the configuration succeeded.",
        now(largest(HOST("config_last_reload_successful"), "instance"), "{{instance}}"),
        unit="none",
        defaults={"mappings": yes_no(no="red")},
    )
    loaded = stat(
        "Configuration loaded",
        "Time since the last successful (re)load.",
        now(age(HOST("config_last_reload_success_timestamp_seconds"), "instance"), "{{instance}}"),
        unit="s",
    )
    errors = stat(
        "Metrics that could not be rendered",
        "Bugs met while rendering, since the exporter started; see its log.",
        now(largest(HOST("collector_errors_total"), "instance"), "{{instance}}"),
        unit="short",
        defaults=limits(red=1),
    )
    return Row("The exporter", [even(8, made, lasted, duty, memory), even(4, version, config, loaded, errors)])

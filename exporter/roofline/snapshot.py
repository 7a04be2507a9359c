"""Everything that is known at one moment, immutable, and the view of it that is still true at a later one.

The daemon replaces its `Snapshot` by a single assignment; metrics, page and report only ever read a `View`.
Staleness is decided in `view`, from the clock it is given, so that a dead measuring loop cannot freeze a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from exporter.roofline.ceiling import (
    CEILING_LIFETIME_SECONDS,
    Bandwidth,
    BandwidthTrack,
    ComputePeak,
    Kernel,
    Roof,
    RoofPolicy,
    ThreadScope,
)
from exporter.roofline.decode import DecodePoint, DecodeSample, place
from exporter.roofline.footprint import Footprint
from exporter.roofline.live import LivePoint, LiveSample, place_live
from exporter.roofline.prefill import PrefillPoint, PrefillSample, place_prefill
from exporter.roofline.reason import Outcome, Reason
from exporter.roofline.verdict import Verdict, judge_server

STALE_INTERVALS: Final = 3
"""A decode value is withheld after this many effective probe intervals without a new sample; a server that was not
checked for this many health intervals is no longer said to be up, and users' traffic that was not seen for as long is
not shown."""
CHECK_SECONDS: Final = 15.0
"""The longest that one health check takes, its three questions timing out."""
BUSY_GRACE_SECONDS: Final = 3600.0
"""Time spent skipping probes for busy users does not age a sample, up to this much."""


class ServerState(StrEnum):
    """What a server is found to be doing."""

    READY = "ready"
    BUSY = "busy"
    SLEEPING = "sleeping"
    LOADING = "loading"
    UNAUTHORIZED = "unauthorized"
    UNREACHABLE = "unreachable"
    UNSUPPORTED = "unsupported"
    STALLED = "stalled"

    @property
    def up(self) -> bool:
        """Whether the server could serve a user."""
        return self in {ServerState.READY, ServerState.BUSY, ServerState.SLEEPING}


@dataclass(frozen=True, slots=True)
class HostInfo:
    """The machine, as far as the exporter's own process may use it."""

    cpu_model: str
    cpus: int
    last_level_cache_bytes: int | None
    memory_bytes: int | None
    kernel: str
    machine: str


@dataclass(frozen=True, slots=True)
class Model:
    """The model behind a server. `name` is a base name, never a path.

    Attributes:
        weight_bytes: Bytes of all tensors of the model.
        parameters: All parameters.
        footprint: None where the server does not tell the model's size.
        file_mismatch: A model file was found whose bytes or parameters are not the server's.
        unused: What the configuration says of the model and cannot be used, and why, for people; may be empty. Another
            text is not another model.
    """

    name: str
    quantization: str
    build: str
    parameters: int | None
    weight_bytes: int | None
    footprint: Footprint | None
    file_mismatch: bool = False
    unused: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """What is known of one batch of one server.

    Attributes:
        success: Whether the last probe gave a sample; None before the first.
        last_success_timestamp: Unix seconds; 0 before the first success.
        reason: Why the last probe gave no sample, or was not made.
        threshold: The floor ratio below which the operator wants to be told.
        below_threshold_samples: Consecutive published samples below it.
        busy_seconds: Time spent skipping probes for busy users since the last sample.
    """

    sample: DecodeSample | None = None
    success: bool | None = None
    duration_seconds: float | None = None
    last_success_timestamp: float = 0.0
    reason: Reason | None = None
    threshold: float | None = None
    below_threshold_samples: int = 0
    busy_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Server:
    """What is known of one server.

    Attributes:
        interval_seconds: The effective probe interval: the configured one, or longer for the duty cycle's sake.
        check_interval_seconds: The health interval.
        checked_at: When the state was last found out, monotonic seconds.
        state_detail: How `state_reason` came, in the words of TLS, HTTP or the system; may be empty.
        succeeded: Probes that gave a sample.
        counts: Probes failed or rejected, and probes skipped, by reason.
        live: Users' own traffic; None while none was measured.
        prefill: Of a long prompt, which only `report --prefill` sends; None where it was not asked for.
    """

    name: str
    policy: RoofPolicy
    interval_seconds: float
    check_interval_seconds: float
    checked_at: float
    batches: Mapping[int, BatchRecord]
    state: ServerState = ServerState.UNREACHABLE
    state_reason: Reason | None = None
    state_detail: str = ""
    slots: int | None = None
    model: Model | None = None
    succeeded: int = 0
    counts: Mapping[Reason, int] = field(default_factory=dict)
    live: LiveSample | None = None
    prefill: PrefillSample | Reason | None = None

    @property
    def probes(self) -> int:
        """All probes that were made: succeeded + failed + rejected."""
        made = (n for reason, n in self.counts.items() if reason.outcome in {Outcome.FAILED, Outcome.REJECTED})
        return self.succeeded + sum(made)


@dataclass(frozen=True, slots=True)
class Host:
    """What is known of this machine's ceilings.

    Attributes:
        problem: Why the last run gave no ceiling, or None.
        last_success_timestamp: Unix seconds; 0 before the first success.
    """

    info: HostInfo
    tracks: Mapping[tuple[Kernel, ThreadScope], BandwidthTrack] = field(default_factory=dict)
    compute: ComputePeak | None = None
    runs: int = 0
    last_success_timestamp: float = 0.0
    rejected_passes: Mapping[Reason, int] = field(default_factory=dict)
    problem: Reason | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is known, with the times at which it was learnt (monotonic seconds).

    Attributes:
        duty_cycle_ratio: Time spent probing in the last hour / that hour.
        config_reload_timestamp: Unix seconds of the last successful (re)load of the configuration.
    """

    host: Host
    servers: tuple[Server, ...] = ()
    duty_cycle_ratio: float = 0.0
    config_reload_ok: bool = True
    config_reload_timestamp: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerView:
    """A server and what is still true of it: its roof, its placed samples by batch, and its users' traffic."""

    server: Server
    roof: Roof
    points: Mapping[int, DecodePoint]
    live: LivePoint | None = None

    @property
    def verdict(self) -> Verdict:
        """What holds the server's decode back."""
        return judge_server(self.points, self.roof)

    @property
    def prefill(self) -> PrefillPoint | Reason | None:
        """The long prompt under the roof, or why there is none; None where it was not asked for."""
        found = self.server.prefill
        if not isinstance(found, PrefillSample):
            return found
        return place_prefill(found, self.server.model.footprint if self.server.model else None, self.roof)


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot at a moment: the same facts without what has grown stale."""

    snapshot: Snapshot
    in_force: tuple[Bandwidth, ...]
    last: tuple[Bandwidth, ...]
    compute: ComputePeak | None
    servers: tuple[ServerView, ...]


def view(snapshot: Snapshot, now: float) -> View:
    """What of the snapshot is still true at `now` (monotonic seconds, the clock of the measurements)."""
    host = snapshot.host
    tracks = host.tracks.values()
    return View(
        snapshot=snapshot,
        in_force=tuple(b for t in tracks if (b := t.in_force(now)) is not None),
        last=tuple(b for t in tracks if (b := t.last(now)) is not None),
        compute=_compute(host, now),
        servers=tuple(view_server(s, host_roof(host, s.policy, now), now) for s in snapshot.servers),
    )


def host_roof(host: Host, policy: RoofPolicy, now: float) -> Roof:
    """A server's roof from what is known of this machine at `now`."""
    ceilings = {
        kernel: best.best_bytes_per_second
        for (kernel, threads), track in host.tracks.items()
        if threads is ThreadScope.ALL and (best := track.in_force(now)) is not None
    }
    compute = _compute(host, now)
    return policy.roof(ceilings, None if compute is None else compute.flops_per_second)


def _compute(host: Host, now: float) -> ComputePeak | None:
    if host.compute is None or now - host.compute.measured_at > CEILING_LIFETIME_SECONDS:
        return None
    return host.compute


def view_server(server: Server, roof: Roof, now: float) -> ServerView:
    """The server's samples that are not stale at `now`, placed under its roof."""
    if now - server.checked_at > STALE_INTERVALS * server.check_interval_seconds + CHECK_SECONDS:
        server = replace(server, state=ServerState.UNREACHABLE, state_reason=None, state_detail="")
    lifetime = STALE_INTERVALS * server.interval_seconds
    footprint = server.model.footprint if server.model else None
    points = {
        batch: place(record.sample, footprint, roof)
        for batch, record in sorted(server.batches.items())
        if record.sample is not None
        and now - record.sample.measured_at <= lifetime + min(record.busy_seconds, BUSY_GRACE_SECONDS)
    }
    live = server.live
    if live is not None and now - live.measured_at > STALE_INTERVALS * server.check_interval_seconds:
        live = None
    return ServerView(server, roof, points, None if live is None else place_live(live, footprint, roof))

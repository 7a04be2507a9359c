"""Sample snapshots for the tests of what is shown. `NOW` and `WALL_NOW` are the same moment on two clocks."""

from dataclasses import replace
from typing import Final

from exporter.roofline.ceiling import (
    Bandwidth,
    BandwidthTrack,
    ComputePeak,
    Device,
    Kernel,
    RoofPolicy,
    ThreadScope,
)
from exporter.roofline.decode import DecodeSample
from exporter.roofline.footprint import Attention, BytesSource, Footprint
from exporter.roofline.live import LiveSample, LiveShare, LiveSource
from exporter.roofline.reason import Reason
from exporter.roofline.snapshot import BatchRecord, Host, HostInfo, Model, Server, ServerState, Snapshot, View, view

NOW: Final = 10_000.0
WALL_NOW: Final = 1_790_000_000.0

INFO: Final = HostInfo("Example CPU 9000", 8, 32 * 2**20, 64 * 2**30, "6.1.0", "x86_64")


def bandwidth(
    kernel: Kernel, gigabytes_per_second: float, threads: ThreadScope = ThreadScope.ALL, measured_at: float = NOW - 60
) -> Bandwidth:
    """A measurement whose median is 2 % below its best."""
    best = gigabytes_per_second * 1e9
    return Bandwidth(
        kernel=kernel,
        threads=threads,
        thread_count=8 if threads is ThreadScope.ALL else 1,
        best_bytes_per_second=best,
        median_bytes_per_second=best / 1.02,
        spread_ratio=0.02,
        passes=20,
        array_bytes=256 * 2**20,
        store="nt",
        isa="avx2",
        pages="thp",
        method="stream",
        scope="process",
        measured_at=measured_at,
    )


def host() -> Host:
    """A machine that triads at 40 GB/s and reads at 50 GB/s with all threads, and computes 400 GFLOP/s."""
    measurements = [
        bandwidth(Kernel.TRIAD, 40),
        bandwidth(Kernel.READ, 50),
        bandwidth(Kernel.TRIAD, 12, ThreadScope.SINGLE),
        bandwidth(Kernel.READ, 15, ThreadScope.SINGLE),
    ]
    return Host(
        info=INFO,
        tracks={(b.kernel, b.threads): BandwidthTrack((b,)) for b in measurements},
        compute=ComputePeak("fp32", 400e9, 0.01, 8, "avx2", NOW - 60),
        runs=3,
        last_success_timestamp=WALL_NOW - 60,
        rejected_passes={Reason.PREEMPTED: 2},
    )


def sample(batch: int, step_seconds: float, *, contended: bool = False, measured_at: float = NOW - 30) -> DecodeSample:
    """A sample of 32 steps at a mean depth of 100 tokens."""
    return DecodeSample(batch, step_seconds, 0.03, 32, 100.0, contended, measured_at)


def record(batch: int, step_seconds: float, *, threshold: float | None = None, contended: bool = False) -> BatchRecord:
    """A batch whose last probe gave a sample."""
    return BatchRecord(
        sample=sample(batch, step_seconds, contended=contended),
        success=True,
        duration_seconds=2.5,
        last_success_timestamp=WALL_NOW - 30,
        threshold=threshold,
    )


MODEL: Final = Model(
    name="tiny-1b-q4_k_m.gguf",
    quantization="Q4_K - Medium",
    build="b11434-abc",
    parameters=1_100_000_000,
    weight_bytes=700_000_000,
    footprint=Footprint(
        parameters=1.0e9,
        weight_bytes=600e6,
        source=BytesSource.FILE,
        head_bytes=100e6,
        attention=(Attention(20_000, 0.0),),
    ),
)
"""A step at batch B and depth 100 reads 600 MB + B x 2 MB and computes B x 2 GFLOP."""


LIVE: Final = LiveSample(
    source=LiveSource.SLOTS,
    streams=1.5,
    tokens_per_second=66.0,
    step_seconds=10 / 440,
    measured_at=NOW - 10,
    shares=(LiveShare(1, 5.0, 220, 220, 100.0), LiveShare(2, 5.0, 440, 220, 300.0)),
)
"""Half of the time one stream, half of it two, at 44 steps/s."""


def cpu_server(name: str = "local", model: Model = MODEL) -> Server:
    """Ready, with 4 slots: 20, 25 and 32 ms for a step of 1, 2 and 4 streams."""
    return Server(
        name=name,
        policy=RoofPolicy(),
        interval_seconds=300.0,
        check_interval_seconds=15.0,
        checked_at=NOW - 5,
        batches={
            1: record(1, 0.020, threshold=0.25),
            2: record(2, 0.025, contended=True),
            4: record(4, 0.032, threshold=0.5),
        },
        state=ServerState.READY,
        slots=4,
        model=model,
        succeeded=9,
        counts={Reason.UNREACHABLE: 2, Reason.FOREIGN_REQUEST: 1, Reason.BUSY: 5},
        live=LIVE,
    )


def gpu_server(name: str = "workstation") -> Server:
    """A GPU of 640 GB/s with 1 slot: only batch 1 measured, its drafts in vain; its bytes are the server's figures."""
    return Server(
        name=name,
        policy=RoofPolicy(device=Device.GPU, peak_bytes_per_second=640e9),
        interval_seconds=300.0,
        check_interval_seconds=15.0,
        checked_at=NOW - 5,
        batches={
            1: replace(record(1, 0.010), sample=replace(sample(1, 0.010), speculative=True)),
            2: BatchRecord(success=False, reason=Reason.TOO_FEW_SLOTS),
            4: BatchRecord(success=False, reason=Reason.TOO_FEW_SLOTS),
        },
        state=ServerState.BUSY,
        slots=1,
        model=Model(
            name="medium-8b-q4_k_m.gguf",
            quantization="Q4_K - Medium",
            build="b11434-abc",
            parameters=8_000_000_000,
            weight_bytes=4_800_000_000,
            footprint=Footprint(parameters=8.0e9, weight_bytes=4.8e9, source=BytesSource.SERVER),
        ),
        succeeded=3,
        counts={Reason.TOO_FEW_SLOTS: 6},
        live=LiveSample(LiveSource.METRICS, None, None, 0.011, NOW - 20),
    )


def rich() -> Snapshot:
    """Two servers: one on the CPU with batch 1, 2, 4 and one on a GPU."""
    return Snapshot(host(), (cpu_server(), gpu_server()), 0.012, config_reload_timestamp=WALL_NOW - 3600)


def empty() -> Snapshot:
    """Nothing configured and nothing measured."""
    return Snapshot(Host(HostInfo("", 1, None, None, "", "")))


def unreachable() -> Snapshot:
    """Just started: two servers, none of which answers, and no ceiling yet."""
    servers = tuple(
        Server(
            name,
            RoofPolicy(),
            300.0,
            15.0,
            NOW - 5,
            {1: BatchRecord(threshold=0.25), 2: BatchRecord()},
            state_reason=Reason.UNREACHABLE,
        )
        for name in ("one", "two")
    )
    return Snapshot(Host(INFO), servers, config_reload_timestamp=WALL_NOW)


def rich_view() -> View:
    """The rich snapshot at `NOW`."""
    return view(rich(), NOW)


def seen(*servers: Server, host: bool = True) -> View:
    """These servers at `NOW`, on the sample machine or on one that was not measured."""
    return view(Snapshot(rich().host if host else empty().host, servers), NOW)


def one_batch(step_seconds: float, threshold: float | None, batch: int = 1) -> Server:
    """The sample server with that batch only."""
    return replace(cpu_server(), batches={batch: record(batch, step_seconds, threshold=threshold)})

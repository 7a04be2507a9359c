"""The bandwidth meter with the real library on this machine."""

import threading
import time
from pathlib import Path

import pytest
from fake_engine import GIB, MIB, PROC, SYS, by

from exporter.measure.bandwidth import BandwidthMeter
from exporter.measure.host import allowed_cpus
from exporter.measure.membench import Membench, MembenchArrays, Way
from exporter.measure.whose import CpuSet
from exporter.roofline.ceiling import BandwidthRun, BandwidthTrack, Kernel, ThreadScope
from exporter.roofline.passes import DISTURBED, flaw
from exporter.roofline.reason import Reason


class TestRealLibrary:
    """The compiled kernels; the machine may be busy, so that a reason is as good as a number."""

    def real(self, max_memory: int) -> BandwidthMeter:
        return BandwidthMeter(max_memory=max_memory, threads=None, proc=PROC, sys=SYS, clock=time.monotonic)

    def test_small_memory(self) -> None:
        run = self.real(64 * MIB).measure(full=True)
        if run.problem is None:
            read = by(run, Kernel.READ, ThreadScope.ALL)
            assert 1e8 < read.best_bytes_per_second < 1e13
            assert read.best_bytes_per_second >= read.median_bytes_per_second
        else:
            assert run.problem in DISTURBED | {Reason.CACHE_SUSPECT, Reason.NO_MEMORY, Reason.NO_THREADS}
        assert run.array_bytes is None or 3 * run.array_bytes <= 64 * MIB

    def test_one_kernel_on_one_cpu(self) -> None:
        engine = Membench()
        bench = engine.open((0,), 8 * MIB + 1000)
        assert not isinstance(bench, Reason)
        run = bench.run(Kernel.TRIAD, Way(engine.isas[0]), passes=4, rest_seconds=0.001, budget_seconds=60.0)
        bench.close()
        assert run.error is None
        assert len(run.passes) == 4
        assert run.amount == (8 * MIB + 1000) // 8 * 24
        assert set(engine.isas) <= {"scalar", "sse2", "avx2", "avx512", "neon"}

    def test_threads_that_run_one_after_the_other_are_no_pass(self) -> None:
        """Two threads on one CPU, with slices of microseconds: each has its CPU, and the memory to itself."""
        engine, cpu = Membench(), allowed_cpus()[0]
        bench = engine.open((cpu, cpu), 3 * MIB)
        assert not isinstance(bench, Reason)
        run = bench.run(Kernel.READ, Way(engine.isas[0]), passes=6, rest_seconds=0.001, budget_seconds=60.0)
        bench.close()
        assert len(run.passes) == 6
        for timed in run.passes:
            assert flaw(timed) is Reason.PREEMPTED, timed

    def test_compute_peak(self) -> None:
        run = Membench().fma((0,), Membench().isas[0], passes=3, pass_seconds=0.01)
        assert run.error is None
        assert run.amount / min(p.seconds for p in run.passes) > 1e8

    def test_memory_that_cannot_be_had_is_a_reason(self) -> None:
        assert Membench().open((0,), 1 << 52) is Reason.NO_MEMORY

    def test_a_wrong_argument_is_a_bug(self) -> None:
        with pytest.raises(ValueError, match="membench"):
            Membench().open((), MIB)

    def test_a_neighbour_on_another_cpu_lowers_no_ceiling(self) -> None:
        """It leaves no trace in any thread's time; the best of the day stays in force, and the last value shows it."""
        if len(allowed_cpus()) < 2:
            pytest.skip("a neighbour needs a CPU of its own")
        subject = self.real(GIB)
        subject._cpus = lambda: CpuSet(allowed_cpus()[:1], "exporter")
        track = BandwidthTrack()

        def measure() -> None:
            nonlocal track
            for _ in range(10):
                found = [b for b in subject.measure(full=False).measurements if b.kernel is Kernel.READ]
                if found:
                    track = track.add(found[0])
                    return

        measure()
        quiet = track.in_force(time.monotonic())
        if quiet is None:
            pytest.skip("this machine is too busy to measure on")
        beside = Membench()
        arrays = beside.open(allowed_cpus()[1:2], 256 * MIB)
        assert isinstance(arrays, MembenchArrays)
        stop = threading.Event()

        def stream() -> None:
            while not stop.is_set():
                arrays.run(Kernel.TRIAD, Way(beside.isas[0]), passes=4, rest_seconds=0.0, budget_seconds=0.3)

        neighbour = threading.Thread(target=stream)
        neighbour.start()
        try:
            measure()
        finally:
            stop.set()
            beside.cancel()
            neighbour.join()  # however long: what it writes to must not be taken from under it
            arrays.close()
        after = track.in_force(time.monotonic())
        assert after
        assert after.best_bytes_per_second >= quiet.best_bytes_per_second

    def test_cancel_from_another_thread(self) -> None:
        subject = self.real(GIB)

        def seconds_to_end() -> float:
            started = threading.Event()
            runs: list[BandwidthRun] = []
            worker = threading.Thread(
                target=lambda: runs.append(subject.measure(full=True, progress=lambda _: started.set()))
            )
            worker.start()
            assert started.wait(60)
            asked = time.monotonic()
            subject.cancel()
            worker.join()
            seconds = time.monotonic() - asked
            assert len(runs[0].measurements) < len(Kernel) * len(ThreadScope)
            assert runs[0].compute is None
            return seconds

        # A busy machine lets the threads wait for their CPUs: one of several.
        assert any(seconds_to_end() < 0.5 for _ in range(5))

    def test_memory_is_given_back(self) -> None:
        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

        engine = Membench()
        before = resident()
        for _ in range(3):
            bench = engine.open((0,), 64 * MIB)
            assert not isinstance(bench, Reason)
            bench.run(Kernel.READ, Way(engine.isas[0]), passes=1, rest_seconds=0.0, budget_seconds=1.0)
            bench.close()
        assert resident() - before < 16 * MIB

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import GIB, MIB, Call, FakeEngine, by, meter
from trees import Machine

from exporter.measure.bandwidth import BandwidthMeter
from exporter.measure.whose import CpuSet
from exporter.roofline.ceiling import Kernel, ThreadScope
from exporter.roofline.passes import (
    Pass,
    Store,
)
from exporter.roofline.reason import Reason


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path).memory().cache("0-7", 3, "32M")
    return found.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")


class TestBurst:
    def test_time_that_the_hypervisor_took_voids_the_whole_run(self, machine: Machine) -> None:
        """10 s of the two CPUs' time within a run of 7: no pass can show that."""
        stat = "cpu{0} 1 0 1 1 0 0 0 {1} 0 0\n"
        machine.write("proc/stat", stat.format(0, 0) + stat.format(1, 0))
        times = iter([0.0, *[7.0] * 1000])

        def steal(_: FakeEngine) -> None:
            machine.write("proc/stat", stat.format(0, 500) + stat.format(1, 500))

        engine = FakeEngine(on_run=steal)
        subject = meter(machine, engine)
        subject._clock = lambda: next(times)
        run = subject.measure(full=True)
        assert run.measurements == ()
        assert run.problem is Reason.PREEMPTED


class TestVariants:
    def test_the_fastest_instruction_set_is_kept(self, machine: Machine) -> None:
        engine = FakeEngine(isas=("wide", "narrow"))
        run = meter(machine, engine).measure(full=True)
        assert {b.isa for b in run.measurements} == {"narrow"}
        assert run.compute
        assert run.compute.isa == "narrow"

    def test_the_servers_cpus_are_measured_and_said_to_be(self, machine: Machine) -> None:
        engine = FakeEngine()
        subject = meter(machine, engine)
        subject._cpus = lambda: CpuSet((3, 5), "server")
        run = subject.measure(full=True)
        assert run.cpus == (3, 5)
        assert {b.scope for b in run.measurements} == {"server"}

    def test_flags_tell_what_to_know(self, machine: Machine) -> None:
        assert by(meter(machine, FakeEngine()).measure(full=True), Kernel.READ, ThreadScope.ALL).flags == ()

    def test_a_configured_compute_peak_is_not_measured(self, machine: Machine) -> None:
        subject = meter(machine, FakeEngine())
        subject._measure_compute = False
        assert subject.measure(full=True).compute is None


class TestFullRun:
    def test_every_kernel_and_scope_and_the_compute_peak(self, machine: Machine) -> None:
        engine = FakeEngine()
        said: list[str] = []
        run = meter(machine, engine).measure(full=True, progress=said.append)
        assert Counter((b.kernel, b.threads) for b in run.measurements) == Counter(
            (k, s) for k in Kernel for s in ThreadScope
        )
        assert by(run, Kernel.READ, ThreadScope.ALL).best_bytes_per_second == pytest.approx(20e9)
        assert by(run, Kernel.READ, ThreadScope.SINGLE).best_bytes_per_second == pytest.approx(10e9)
        assert by(run, Kernel.READ, ThreadScope.ALL).thread_count == 2
        assert run.compute
        assert run.compute.flops_per_second == pytest.approx(2 * 1e9 / 0.01)
        assert run.problem is None
        assert run.rejected == {}
        assert said[0] == "array size"
        assert said[-1] == "compute peak"
        assert "triad, 1 thread" in said
        assert engine.opened == engine.closed

    def test_arrays_are_four_times_the_cache(self, machine: Machine) -> None:
        run = meter(machine, FakeEngine()).measure(full=True)
        assert run.array_bytes == 128 * MIB
        assert {b.array_bytes for b in run.measurements} == {128 * MIB}

    def test_never_more_than_the_budget_is_mapped(self, machine: Machine) -> None:
        engine = FakeEngine()
        meter(machine, engine, max_memory=500 * MIB).measure(full=True)
        assert engine.most_mapped <= 500 * MIB

    def test_the_faster_store_is_published(self, machine: Machine) -> None:
        run = meter(machine, FakeEngine(plain_share=0.7)).measure(full=True)
        assert by(run, Kernel.TRIAD, ThreadScope.ALL).store == "nt"
        assert by(run, Kernel.READ, ThreadScope.ALL).store == "plain"
        run = meter(machine, FakeEngine(plain_share=1.2)).measure(full=True)
        assert by(run, Kernel.TRIAD, ThreadScope.ALL).store == "plain"

    @pytest.mark.parametrize(("plain_share", "tries"), [(0.7, 1), (0.95, 4)])
    def test_a_decisive_store_is_not_questioned_by_every_kernel(
        self, machine: Machine, plain_share: float, tries: int
    ) -> None:
        engine = FakeEngine(plain_share=plain_share)
        run = meter(machine, engine, cpus=1).measure(full=True)
        plain = [c for c in engine.calls if c.store is Store.PLAIN and c.kernel is not Kernel.READ]
        assert len(plain) == tries
        assert len(run.measurements) == 10

    def test_without_nt_stores_plain_ones_are_measured(self, machine: Machine) -> None:
        engine = FakeEngine(fail=lambda call: Reason.UNSUPPORTED if call.store is Store.NT else None)
        run = meter(machine, engine).measure(full=True)
        assert {b.store for b in run.measurements} == {"plain"}
        assert len(run.measurements) == 10
        assert run.rejected == {}

    def test_all_is_the_best_of_the_swept_counts(self, machine: Machine) -> None:
        def slow_when_crowded(call: Call, timed: Pass) -> Pass:
            return replace(timed, seconds=timed.seconds * (2 if len(call.cpus) == 8 else 1))

        run = meter(machine, FakeEngine(spoil=slow_when_crowded), cpus=8).measure(full=True)
        assert by(run, Kernel.READ, ThreadScope.ALL).thread_count == 4
        assert by(run, Kernel.READ, ThreadScope.ALL).best_bytes_per_second == pytest.approx(30e9)

    def test_a_single_thread_may_beat_all_others_and_is_tracked_then(self, machine: Machine) -> None:
        def slow_when_crowded(call: Call, timed: Pass) -> Pass:
            return replace(timed, seconds=timed.seconds * len(call.cpus) ** 2)

        subject = meter(machine, FakeEngine(spoil=slow_when_crowded), cpus=8)
        assert by(subject.measure(full=True), Kernel.READ, ThreadScope.ALL).thread_count == 1
        assert by(subject.measure(full=False), Kernel.READ, ThreadScope.ALL).thread_count == 1

    def test_one_cpu_has_both_scopes(self, machine: Machine) -> None:
        run = meter(machine, FakeEngine(), cpus=1).measure(full=True)
        assert len(run.measurements) == 10
        assert {b.thread_count for b in run.measurements} == {1}

    def test_the_thread_limit_holds(self, machine: Machine) -> None:
        engine = FakeEngine()
        meter(machine, engine, cpus=8, threads=3).measure(full=True)
        assert max(len(call.cpus) for call in engine.calls) == 3

    def test_pages_are_told_from_the_growth_of_huge_pages(self, machine: Machine) -> None:
        def rollup(mapped: int) -> None:
            machine.write("proc/self/smaps_rollup", f"AnonHugePages: {(4 * MIB + mapped) >> 10} kB\n")

        rollup(0)
        run = meter(machine, FakeEngine(touch=rollup)).measure(full=True)
        assert {b.pages for b in run.measurements} == {"2MiB"}
        run = meter(machine, FakeEngine(touch=lambda n: rollup(n // 2))).measure(full=True)
        assert {b.pages for b in run.measurements} == {"4KiB"}

    def test_pages_unknown(self, machine: Machine) -> None:
        run = meter(machine, FakeEngine()).measure(full=True)
        assert {b.pages for b in run.measurements} == {"unknown"}


class TestRejection:
    @pytest.mark.parametrize(
        ("flaw", "reason"),
        [
            (Pass(1.0, 0.8, 1.0, 0, 0), Reason.PREEMPTED),
            (Pass(1.0, 1.0, 1.0, 0, 3), Reason.PAGE_FAULTS),
            (Pass(1.0, 1.0, 1.5, 0, 0), Reason.IMBALANCED),
        ],
    )
    def test_a_kernel_that_is_always_disturbed_has_no_number_and_the_others_have(
        self, machine: Machine, flaw: Pass, reason: Reason
    ) -> None:
        def spoil(call: Call, timed: Pass) -> Pass:
            return replace(flaw, seconds=timed.seconds) if call.kernel is Kernel.COPY else timed

        run = meter(machine, FakeEngine(spoil=spoil)).measure(full=True)
        assert {b.kernel for b in run.measurements} == set(Kernel) - {Kernel.COPY}
        assert run.problem is None
        assert set(run.rejected) == {reason}

    def test_a_disturbed_run_is_made_once_more(self, machine: Machine) -> None:
        def spoil(call: Call, timed: Pass) -> Pass:
            return replace(timed, cpu_ratio=0.6 if call.repeat == 0 else 1.0)

        run = meter(machine, FakeEngine(spoil=spoil)).measure(full=True)
        assert len(run.measurements) == 10
        assert run.rejected[Reason.PREEMPTED] > 10

    def test_the_widest_set_disturbed_means_no_ceiling_for_all(self, machine: Machine) -> None:
        def spoil(call: Call, timed: Pass) -> Pass:
            first = call.array_bytes == 128 * MIB and call.kernel is Kernel.READ and call.repeat > 0
            return replace(timed, cpu_ratio=0.6 if first and len(call.cpus) == 2 else 1.0)

        run = meter(machine, FakeEngine(spoil=spoil)).measure(full=True)
        assert run.problem is Reason.PREEMPTED
        assert (Kernel.READ, ThreadScope.ALL) not in {(b.kernel, b.threads) for b in run.measurements}
        assert by(run, Kernel.READ, ThreadScope.SINGLE).thread_count == 1

    def test_an_uneven_widest_set_leaves_the_next_one(self, machine: Machine) -> None:
        def spoil(call: Call, timed: Pass) -> Pass:
            return replace(timed, imbalance=1.6 if len(call.cpus) == 8 else 1.0)

        engine = FakeEngine(spoil=spoil)
        subject = meter(machine, engine, cpus=8)
        run = subject.measure(full=True)
        assert run.problem is None
        assert by(run, Kernel.READ, ThreadScope.ALL).thread_count == 4
        assert by(subject.measure(full=False), Kernel.READ, ThreadScope.ALL).thread_count == 4

    def test_scattered_passes_are_unstable(self, machine: Machine) -> None:
        times = iter([1.0, 1.4, 1.5, 1.6] * 1000)

        def spoil(call: Call, timed: Pass) -> Pass:
            return replace(timed, seconds=timed.seconds * next(times)) if call.kernel is Kernel.ADD else timed

        run = meter(machine, FakeEngine(spoil=spoil)).measure(full=True)
        assert Kernel.ADD not in {b.kernel for b in run.measurements}
        assert run.rejected[Reason.UNSTABLE] >= 1

    def test_an_invalid_result_is_never_published(self, machine: Machine) -> None:
        engine = FakeEngine(fail=lambda call: Reason.INVALID_RESULT if call.kernel is Kernel.SCALE else None)
        run = meter(machine, engine).measure(full=True)
        assert Kernel.SCALE not in {b.kernel for b in run.measurements}
        assert run.rejected == {Reason.INVALID_RESULT: 2}

    @pytest.mark.parametrize("reason", [Reason.NO_MEMORY, Reason.NO_THREADS])
    def test_arrays_that_cannot_be_had(self, machine: Machine, reason: Reason) -> None:
        run = meter(machine, FakeEngine(refuse=lambda _cpus, _size: reason)).measure(full=True)
        assert run.problem is reason
        assert run.measurements == ()
        assert run.compute, "registers need no memory"


class TestBurstCounters:
    """What a thread's own counters do not show: the control group's quota, and the pressure on CPUs and memory."""

    def growing(self, machine: Machine, path: str, text: str) -> Callable[[FakeEngine], None]:
        total = iter(range(1_000_000, 1_000_000_000, 300_000))

        def grow(_: FakeEngine) -> None:
            machine.write(path, text.format(next(total)))

        return grow

    def test_a_quota_that_ran_out_is_told_from_a_neighbour(self, machine: Machine) -> None:
        machine.mount_v2().group(
            "sys/fs/cgroup", {"cpu.max": "50000 100000", "cpu.stat": "throttled_usec 5", "memory.max": "max"}
        )
        engine = FakeEngine(
            spoil=lambda call, timed: replace(timed, cpu_ratio=0.6 if call.kernel is Kernel.COPY else 1.0),
            on_run=self.growing(machine, "sys/fs/cgroup/cpu.stat", "throttled_usec {}\n"),
        )
        run = meter(machine, engine).measure(full=True)
        assert set(run.rejected) == {Reason.THROTTLED}
        assert run.problem is None, "passes that had their CPUs count, whatever the quota did between them"
        assert Kernel.COPY not in {b.kernel for b in run.measurements}

    def test_waiting_for_memory_voids_the_burst(self, machine: Machine) -> None:
        machine.write("proc/pressure/memory", "some avg10=0 total=1\n")
        engine = FakeEngine(on_run=self.growing(machine, "proc/pressure/memory", "some avg10=0 total={}\n"))
        run = meter(machine, engine).measure(full=True)
        assert run.problem is Reason.MEMORY_PRESSURE
        assert run.measurements == ()
        assert run.rejected[Reason.MEMORY_PRESSURE] > 3

    def test_waiting_for_a_cpu_is_told_beside_the_number(self, machine: Machine) -> None:
        machine.write("proc/pressure/cpu", "some avg10=0 total=1\n")
        engine = FakeEngine(on_run=self.growing(machine, "proc/pressure/cpu", "some avg10=0 total={}\n"))
        run = meter(machine, engine).measure(full=True)
        assert len(run.measurements) == 10
        assert {b.flags for b in run.measurements} == {("contended",)}
        machine.write("proc/pressure/cpu", "some avg10=0 total=1\n")
        assert {b.flags for b in meter(machine, FakeEngine()).measure(full=True).measurements} == {()}


class TestShortRun:
    def test_read_and_triad_as_they_were_fastest(self, machine: Machine) -> None:
        engine = FakeEngine()
        subject = meter(machine, engine)
        subject.measure(full=True)
        engine.calls.clear()
        run = subject.measure(full=False)
        assert [(c.kernel, c.store, len(c.cpus)) for c in engine.calls] == [
            (Kernel.READ, Store.PLAIN, 2),
            (Kernel.TRIAD, Store.NT, 2),
        ]
        assert {(b.kernel, b.threads) for b in run.measurements} == {
            (Kernel.READ, ThreadScope.ALL),
            (Kernel.TRIAD, ThreadScope.ALL),
        }
        assert run.compute is None

    def test_without_a_full_run_the_first_is_full(self, machine: Machine) -> None:
        assert len(meter(machine, FakeEngine()).measure(full=False).measurements) == 10

    def test_other_cpus_need_a_full_run(self, machine: Machine) -> None:
        engine = FakeEngine()
        cpus: list[tuple[int, ...]] = [(0, 1)]
        subject = BandwidthMeter(
            max_memory=GIB,
            threads=None,
            proc=machine.proc,
            sys=machine.sys,
            clock=lambda: 7.0,
            engine=engine,
            cpus=lambda: CpuSet(cpus[-1], "exporter"),
        )
        subject.measure(full=True)
        cpus.append((4, 5, 6))
        run = subject.measure(full=False)
        assert len(run.measurements) == 10
        assert run.cpus == (4, 5, 6)

    def test_less_memory_than_before_needs_a_new_proof_only(self, machine: Machine) -> None:
        engine = FakeEngine()
        subject = meter(machine, engine)
        subject.measure(full=True)
        machine.memory(free=800 * MIB)
        run = subject.measure(full=False)
        assert run.array_bytes == 200 * MIB // 3 // 64 * 64
        assert len(run.measurements) == 2
        machine.memory(free=100 * MIB)
        assert subject.measure(full=False).problem is Reason.CACHE_SUSPECT

    def test_a_kernel_that_failed_in_the_full_run_is_tried_again(self, machine: Machine) -> None:
        engine = FakeEngine(fail=lambda call: Reason.NO_THREADS if call.kernel is Kernel.TRIAD else None)
        subject = meter(machine, engine)
        subject.measure(full=True)
        engine.fail = lambda _: None
        assert {b.kernel for b in subject.measure(full=False).measurements} == {Kernel.READ, Kernel.TRIAD}


class TestCancel:
    def test_what_was_measured_stands_and_the_next_run_is_free(self, machine: Machine) -> None:
        def stop(engine: FakeEngine) -> None:
            if len(engine.calls) == 6:
                engine.cancel()

        engine = FakeEngine(on_run=stop)
        subject = meter(machine, engine)
        run = subject.measure(full=True)
        assert len(engine.calls) == 6
        assert run.rejected == {Reason.CANCELLED: 1}
        assert run.measurements
        assert engine.opened == engine.closed
        engine.on_run = lambda _: None
        assert len(subject.measure(full=True).measurements) == 10

    def test_a_cancel_before_the_run_ends_it_at_once(self, machine: Machine) -> None:
        engine = FakeEngine()
        subject = meter(machine, engine)
        subject.cancel()
        run = subject.measure(full=True)
        assert run.problem is Reason.CANCELLED
        assert len(engine.calls) <= 1

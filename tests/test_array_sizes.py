"""How large the arrays are, and whether caches are outgrown or flushed."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import GIB, GROUP, MIB, Call, FakeEngine, by, meter
from trees import Machine

from exporter.roofline.ceiling import Kernel, ThreadScope
from exporter.roofline.passes import (
    EVICT_SLICE_BYTES,
    EVICT_SMALL_PAGES_SLICE_BYTES,
    Method,
    Pass,
    Store,
)
from exporter.roofline.reason import Reason


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path).memory().cache("0-7", 3, "32M")
    return found.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")


class TestEvict:
    """Small arrays, flushed before every pass, where the budget is below what the cache asks for."""

    def test_they_are_used_where_streams_rule_does_not_fit(self, machine: Machine) -> None:
        """A 384 MiB cache: STREAM asks for 4.5 GiB, eviction for 96 MiB."""
        machine.cache("0-7", 3, "393216K")
        engine = FakeEngine(evict_supported=True)
        run = meter(machine, engine).measure(full=True)
        assert run.problem is None
        assert {b.method for b in run.measurements} == {"evict"}
        assert {c.method for c in engine.calls} == {Method.EVICT}
        assert by(run, Kernel.READ, ThreadScope.ALL).best_bytes_per_second == pytest.approx(20e9)
        assert by(run, Kernel.READ, ThreadScope.ALL).array_bytes == 2 * EVICT_SLICE_BYTES
        assert by(run, Kernel.READ, ThreadScope.SINGLE).array_bytes == EVICT_SLICE_BYTES

    def test_they_are_not_used_where_streams_rule_fits(self, machine: Machine) -> None:
        run = meter(machine, FakeEngine(evict_supported=True)).measure(full=True)
        assert {b.method for b in run.measurements} == {"stream"}

    def test_nothing_is_written_through_the_caches(self, machine: Machine) -> None:
        """A line that stays in a cache is not paid for within the pass."""
        machine.cache("0-7", 3, "393216K")
        engine = FakeEngine(evict_supported=True)
        meter(machine, engine).measure(full=True)
        assert {c.store for c in engine.calls if c.kernel is not Kernel.READ} == {Store.NT}

    def test_a_small_container_gets_a_read_ceiling(self, machine: Machine) -> None:
        """128 MiB of which 60 are used: a quarter of the rest times nothing, half of it does, on eight CPUs too."""
        machine.cache("0-7", 3, "393216K").mount_v2().group(
            GROUP, {"memory.max": 128 * MIB, "memory.current": 60 * MIB}
        )
        for cpus in (2, 8):
            engine = FakeEngine(evict_supported=True)
            run = meter(machine, engine, cpus=cpus).measure(full=True)
            assert run.problem is None
            assert by(run, Kernel.READ, ThreadScope.SINGLE).flags == ()
            assert len(engine.calls[0].cpus) == cpus
            assert 20 * MIB < engine.most_mapped <= 34 * MIB

    def test_each_thread_refills_the_private_cache_of_its_core(self, machine: Machine) -> None:
        machine.cache("0-7", 3, "393216K")
        for cpu in range(8):
            machine.cache(str(cpu), 2, "1280K")
        engine = FakeEngine(evict_supported=True)
        meter(machine, engine).measure(full=True)
        assert engine.refills == {1280 << 10}
        (engine := FakeEngine()).refills.clear()
        machine.cache("0-7", 3, "32M")
        meter(machine, engine).measure(full=True)
        assert engine.refills == {0}, "nothing is flushed"

    def test_a_limit_that_cannot_be_seen_is_expected_to_be_small(self, machine: Machine) -> None:
        """A container without /sys: /proc says that there is a group, and nothing says how large it may grow."""
        machine.cache("0-7", 3, "393216K").write("proc/self/cgroup", "4:memory:/docker/abc\n0::/\n")
        run = meter(machine, FakeEngine(evict_supported=True)).measure(full=True)
        assert run.problem is None
        assert run.array_bytes
        assert 14 * MIB < run.array_bytes <= (48 - 2 * 2) * MIB / 3

    def test_without_huge_pages_the_slices_are_larger(self, machine: Machine) -> None:
        machine.cache("0-7", 3, "393216K").write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
        run = meter(machine, FakeEngine(evict_supported=True)).measure(full=True)
        assert run.array_bytes == 2 * EVICT_SMALL_PAGES_SLICE_BYTES

    def test_too_little_memory_for_either_is_a_reason(self, machine: Machine) -> None:
        machine.cache("0-7", 3, "393216K").mount_v2().group(GROUP, {"memory.max": 70 * MIB, "memory.current": 60 * MIB})
        run = meter(machine, FakeEngine(evict_supported=True)).measure(full=True)
        assert run.measurements == ()
        assert run.problem is Reason.NO_MEMORY

    def test_tracking_runs_use_them_too(self, machine: Machine) -> None:
        machine.cache("0-7", 3, "393216K")
        engine = FakeEngine(evict_supported=True)
        subject = meter(machine, engine)
        subject.measure(full=True)
        engine.calls.clear()
        run = subject.measure(full=False)
        assert {b.kernel for b in run.measurements} == {Kernel.READ, Kernel.TRIAD}
        assert {c.method for c in engine.calls} == {Method.EVICT}

    @pytest.mark.parametrize("first", [Method.EVICT, Method.STREAM])
    def test_memory_that_comes_free_or_runs_short_has_the_other_method_measured_anew(
        self, machine: Machine, first: Method
    ) -> None:
        """Small arrays that count only while they are flushed stay in the cache as soon as nobody flushes them."""
        machine.cache("0-7", 3, "262144K")
        second, free = (Method.STREAM, 400 * GIB) if first is Method.EVICT else (Method.EVICT, 100 * MIB)
        machine.memory(free=100 * MIB if first is Method.EVICT else 400 * GIB)
        engine = FakeEngine(evict_supported=True, cache_bytes=256 * MIB)
        subject = meter(machine, engine, max_memory=8 * GIB)
        assert {b.method for b in subject.measure(full=True).measurements} == {first.value}
        machine.memory(free=free)
        engine.calls.clear()
        run = subject.measure(full=False)
        assert run.problem is None
        assert {b.method for b in run.measurements} == {second.value}
        writes = {c.store for c in engine.calls if c.kernel is not Kernel.READ}
        if second is Method.STREAM:
            assert min(c.array_bytes for c in engine.calls) > 256 * MIB / 3
        else:
            assert writes == {Store.NT}
        engine.calls.clear()
        subject.measure(full=False)
        assert {c.kernel for c in engine.calls} == {Kernel.READ, Kernel.TRIAD}, "and what is known is tracked again"


class TestSize:
    def test_noise_does_not_look_like_a_cache(self, machine: Machine) -> None:
        """A size that was disturbed once is tried again, and the best of each size is compared."""

        def spoil(call: Call, timed: Pass) -> Pass:
            return replace(timed, seconds=timed.seconds * (1.2 if call.array_bytes > 300 * MIB else 1.0))

        def once(call: Call, timed: Pass) -> Pass:
            return spoil(call, timed) if call.repeat == 0 else timed

        assert meter(machine, FakeEngine(spoil=once)).measure(full=True).problem is None
        assert meter(machine, FakeEngine(spoil=spoil)).measure(full=True).problem is Reason.CACHE_SUSPECT

    @pytest.mark.parametrize("share", [1.02, 1.04])
    def test_half_the_size_must_agree_within_3_percent(self, machine: Machine, share: float) -> None:
        def spoil(call: Call, timed: Pass) -> Pass:
            return replace(timed, seconds=timed.seconds * (share if call.array_bytes > 300 * MIB else 1.0))

        run = meter(machine, FakeEngine(spoil=spoil)).measure(full=True)
        assert run.problem is (None if share < 1.03 else Reason.CACHE_SUSPECT)

    def test_many_cores_with_little_memory_use_fewer_threads(self, machine: Machine) -> None:
        """96 threads ask for 336 MiB at least to measure with flushed caches; 48 fit into 300."""
        for cpu in range(8, 96):
            machine.cache(str(cpu), 3, "32M")
        run = meter(machine, FakeEngine(evict_supported=True), cpus=96, max_memory=300 * MIB).measure(full=True)
        assert run.problem is None
        best = by(run, Kernel.READ, ThreadScope.ALL)
        assert best.thread_count <= 48
        assert best.flags == ("few_threads",)

    def test_few_cores_are_not_measured_with_fewer_threads(self, machine: Machine) -> None:
        machine.memory(free=80 * MIB)
        assert meter(machine, FakeEngine(evict_supported=True), cpus=4).measure(full=True).problem is None
        run = meter(machine, FakeEngine(evict_supported=True), cpus=8).measure(full=True)
        assert run.problem is Reason.CACHE_SUSPECT

    def test_a_cache_larger_than_told_is_found_and_outgrown(self, machine: Machine) -> None:
        run = meter(machine, FakeEngine(cache_bytes=400 * MIB)).measure(full=True)
        assert run.problem is None
        assert run.array_bytes == GIB // 3 // 64 * 64
        assert by(run, Kernel.READ, ThreadScope.ALL).best_bytes_per_second == pytest.approx(20e9)

    def test_a_cache_that_the_budget_cannot_outgrow_is_suspect(self, machine: Machine) -> None:
        engine = FakeEngine(cache_bytes=700 * MIB)
        run = meter(machine, engine).measure(full=True)
        assert run.problem is Reason.CACHE_SUSPECT
        assert run.measurements == ()
        assert run.rejected == {Reason.CACHE_SUSPECT: 1}
        assert engine.opened == engine.closed

    def test_arrays_smaller_than_the_told_cache_are_not_even_tried(self, machine: Machine) -> None:
        engine = FakeEngine()
        run = meter(machine, engine, max_memory=31 * MIB).measure(full=True)
        assert run.problem is Reason.CACHE_SUSPECT
        assert not engine.calls

    def test_no_memory(self, machine: Machine) -> None:
        machine.memory(free=8 * MIB)
        run = meter(machine, FakeEngine()).measure(full=True)
        assert run.problem is Reason.NO_MEMORY
        assert run.rejected == {Reason.NO_MEMORY: 1}
        assert run.array_bytes is None

    def test_an_untold_cache_is_assumed_and_said_so(self, tmp_path: Path) -> None:
        run = meter(Machine(tmp_path).memory(), FakeEngine()).measure(full=True)
        assert run.problem is None
        assert {b.flags for b in run.measurements} == {("cache_assumed",)}
        assert run.array_bytes == 4 * 32 * MIB

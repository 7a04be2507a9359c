"""What a bandwidth run takes over from earlier ones, the order of its figures, and the library's own bounds."""

from pathlib import Path

import pytest
from fake_engine import GIB, MIB, Call, FakeEngine, meter
from trees import Machine

from exporter.measure.membench import MOST_REFILL_BYTES, MOST_THREADS
from exporter.roofline.ceiling import Kernel, ThreadScope
from exporter.roofline.passes import Method, Pass, Store
from exporter.roofline.reason import Reason


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = Machine(tmp_path).memory().cache("0-7", 3, "32M")
    return found.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")


def test_a_triad_that_the_full_run_lost_is_written_past_the_caches_in_a_short_one(machine: Machine) -> None:
    """A plain store's line would be paid for after the pass."""
    machine.cache("0-7", 3, "393216K")
    lost = [True]

    def fail(call: Call) -> Reason | None:
        if call.method is Method.EVICT and call.kernel is not Kernel.READ and call.store is Store.PLAIN:
            return Reason.UNSUPPORTED
        return Reason.INVALID_RESULT if call.kernel is Kernel.TRIAD and lost[0] else None

    engine = FakeEngine(evict_supported=True, fail=fail)
    subject = meter(machine, engine)
    run = subject.measure(full=True)
    assert run.problem is None
    assert Kernel.TRIAD not in {b.kernel for b in run.measurements}
    lost[0] = False
    engine.calls.clear()
    run = subject.measure(full=False)
    assert {(b.kernel, b.store) for b in run.measurements} == {(Kernel.READ, "plain"), (Kernel.TRIAD, "nt")}
    assert run.rejected == {}


def test_fewer_threads_than_were_fastest_have_everything_measured_anew(machine: Machine) -> None:
    """Memory that sufficed for a thread on each of 96 CPUs suffices for 48 now."""
    for cpu in range(96):
        machine.cache(str(cpu), 3, "32M")
    machine.memory(free=4 * GIB)
    engine = FakeEngine(evict_supported=True)

    def faster_when_many(call: Call, timed: Pass) -> Pass:
        return Pass(timed.seconds / len(call.cpus), 1.0, 1.0, 0, 0)

    engine.spoil = faster_when_many
    subject = meter(machine, engine, cpus=96)
    run = subject.measure(full=True)
    assert {b.thread_count for b in run.measurements if b.threads is ThreadScope.ALL} == {96}
    machine.memory(free=1000 * MIB)
    run = subject.measure(full=False)
    assert run.problem is None
    assert {b.thread_count for b in run.measurements if b.threads is ThreadScope.ALL} == {48}
    assert {b.kernel for b in run.measurements} == set(Kernel)


def test_measurements_come_in_one_order(machine: Machine) -> None:
    """Whichever kernel is measured first: all threads before one, the kernels as they are defined."""
    kernels = list(Kernel)
    engine = FakeEngine()
    subject = meter(machine, engine, cpus=8)
    full, short = subject.measure(full=True), subject.measure(full=False)
    assert [(b.threads, b.kernel) for b in full.measurements] == [
        (scope, kernel) for scope in (ThreadScope.ALL, ThreadScope.SINGLE) for kernel in kernels
    ]
    assert [b.kernel for b in short.measurements] == [k for k in kernels if k in {Kernel.READ, Kernel.TRIAD}]


def test_a_private_cache_larger_than_the_library_refills_is_refilled_as_far_as_it_goes(machine: Machine) -> None:
    machine.cache("0-7", 3, "393216K").memory(free=3 * GIB)
    for cpu in range(8):
        machine.cache(str(cpu), 2, "131072K")
    engine = FakeEngine(evict_supported=True)
    assert meter(machine, engine).measure(full=True).problem is None
    assert engine.refills == {MOST_REFILL_BYTES}


@pytest.mark.parametrize("threads", [None, 4096])
def test_no_more_threads_than_the_library_takes(machine: Machine, threads: int | None) -> None:
    machine.memory(free=4000 * GIB)
    engine = FakeEngine()
    subject = meter(machine, engine, cpus=1025, max_memory=100 * GIB, threads=threads)
    assert subject.measure(full=True).problem is None
    assert max(len(call.cpus) for call in engine.calls) == MOST_THREADS

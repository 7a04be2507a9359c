import os
import subprocess
import sys
from pathlib import Path

import pytest
from trees import V1_NO_LIMIT, Machine

from exporter.measure.cgroup import memory_left_bytes, memory_limit_bytes, quota_cpus, throttled_seconds
from exporter.measure.host import (
    ContentionMeter,
    allowed_cpus,
    anonymous_huge_bytes,
    cpu_model,
    host_info,
    huge_page_bytes,
    memory_budget_bytes,
    pressure_seconds,
    steal_seconds,
)
from exporter.measure.topology import (
    assumed_cache_bytes,
    cpu_list,
    last_level_cache_bytes,
    private_cache_bytes,
    thread_sets,
)
from exporter.roofline.passes import EvictPlan, plan_evict, plan_sizes
from exporter.roofline.reason import Reason

MIB, GIB = 1 << 20, 1 << 30
PROC, SYS = Path("/proc"), Path("/sys")
ROOT = Path(__file__).parent.parent


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def left(machine: Machine) -> int | None:
    return memory_left_bytes(machine.proc, machine.sys)


class TestMemory:
    def test_a_quarter_of_the_free_memory_not_of_the_available(self, machine: Machine) -> None:
        machine.memory(total=64 * GIB, free=2 * GIB)
        assert memory_budget_bytes(machine.proc, machine.sys, 8 * GIB) == GIB // 2

    def test_the_configured_cap_binds_on_a_large_machine(self, machine: Machine) -> None:
        machine.memory()
        assert memory_budget_bytes(machine.proc, machine.sys, GIB) == GIB

    def test_without_any_file_the_cap_remains(self, machine: Machine) -> None:
        assert memory_budget_bytes(machine.proc, machine.sys, GIB) == GIB

    def test_v2_the_tightest_ancestor_binds(self, machine: Machine) -> None:
        machine.mount_v2(path="/kubepods/pod1/ctr").memory()
        top = "sys/fs/cgroup/kubepods"
        machine.group(f"{top}/pod1/ctr", {"memory.max": "max", "memory.current": GIB})
        machine.group(f"{top}/pod1", {"memory.max": 4 * GIB, "memory.current": 3 * GIB})
        machine.group(top, {"memory.max": 60 * GIB, "memory.current": 3 * GIB})
        assert left(machine) == GIB
        assert memory_budget_bytes(machine.proc, machine.sys, 8 * GIB) == GIB // 4
        assert memory_limit_bytes(machine.proc, machine.sys) == 4 * GIB

    def test_v2_memory_high_binds_too(self, machine: Machine) -> None:
        machine.mount_v2(path="/a").group(
            "sys/fs/cgroup/a", {"memory.max": 4 * GIB, "memory.high": 2 * GIB, "memory.current": GIB}
        )
        assert left(machine) == GIB

    def test_v2_page_cache_counts_as_used(self, machine: Machine) -> None:
        files: dict[str, int | str] = {
            "memory.max": 4 * GIB,
            "memory.current": 4 * GIB,
            "memory.stat": f"inactive_file {3 * GIB}",
        }
        machine.mount_v2(path="/a").group("sys/fs/cgroup/a", files)
        assert left(machine) == 0

    def test_v1_own_group_and_ancestors(self, machine: Machine) -> None:
        machine.mount_v1("memory", "/sys/fs/cgroup/memory", path="/docker/abc")
        base = "sys/fs/cgroup/memory"
        machine.group(f"{base}/docker/abc", {"memory.limit_in_bytes": 3 * GIB, "memory.usage_in_bytes": GIB})
        machine.group(f"{base}/docker", {"memory.limit_in_bytes": 2 * GIB, "memory.usage_in_bytes": GIB})
        machine.group(base, {"memory.limit_in_bytes": V1_NO_LIMIT, "memory.usage_in_bytes": 9 * GIB})
        assert left(machine) == GIB

    def test_v1_no_limit_is_none(self, machine: Machine) -> None:
        machine.mount_v1("memory", "/sys/fs/cgroup/memory")
        machine.group("sys/fs/cgroup/memory", {"memory.limit_in_bytes": V1_NO_LIMIT, "memory.usage_in_bytes": GIB})
        assert left(machine) is None

    def test_v1_in_a_container_the_mount_shows_the_own_group(self, machine: Machine) -> None:
        machine.mount_v1("memory", "/sys/fs/cgroup/memory", path="/docker/abc", root="/docker/abc")
        machine.group("sys/fs/cgroup/memory", {"memory.limit_in_bytes": 2 * GIB, "memory.usage_in_bytes": GIB})
        assert left(machine) == GIB

    @pytest.mark.parametrize("path", ["/kubepods/pod1/ctr", "/../../system.slice", "/"])
    def test_a_path_that_does_not_exist_below_the_mount_means_the_mount(self, machine: Machine, path: str) -> None:
        machine.mount_v2(path=path).group("sys/fs/cgroup", {"memory.max": 2 * GIB, "memory.current": GIB})
        assert left(machine) == GIB

    def test_a_mount_root_outside_the_namespace(self, machine: Machine) -> None:
        machine.mount_v2(path="/", root="/../..").group("sys/fs/cgroup", {"memory.max": GIB, "memory.current": 0})
        assert left(machine) == GIB

    def test_hybrid_memory_lives_in_v1(self, machine: Machine) -> None:
        machine.mount_v1("cpu,cpuacct", "/sys/fs/cgroup/cpu,cpuacct")
        machine.mount_v1("memory", "/sys/fs/cgroup/memory", path="/a").mount_v2("/sys/fs/cgroup/unified", path="/a")
        machine.group("sys/fs/cgroup/unified/a", {"cgroup.procs": ""})
        machine.group("sys/fs/cgroup/memory/a", {"memory.limit_in_bytes": 2 * GIB, "memory.usage_in_bytes": GIB})
        assert left(machine) == GIB

    def test_a_mount_elsewhere_with_a_blank_in_its_name(self, machine: Machine) -> None:
        at = machine.root / "my groups"
        machine.mount_v2(str(at).replace(" ", "\\040"))
        at.mkdir()
        (at / "memory.max").write_text(f"{GIB}\n")
        (at / "memory.current").write_text("0\n")
        assert left(machine) == GIB

    @pytest.mark.parametrize(
        ("directory", "files"),
        [
            ("sys/fs/cgroup", {"cgroup.controllers": "memory", "memory.max": GIB, "memory.current": 0}),
            ("sys/fs/cgroup/memory", {"memory.limit_in_bytes": GIB, "memory.usage_in_bytes": 0}),
        ],
    )
    def test_without_mountinfo_the_usual_places(
        self, machine: Machine, directory: str, files: dict[str, int | str]
    ) -> None:
        machine.group(directory, files)
        assert left(machine) == GIB

    def test_usage_above_the_limit_leaves_nothing(self, machine: Machine) -> None:
        machine.mount_v2().group("sys/fs/cgroup", {"memory.max": GIB, "memory.current": 2 * GIB}).memory()
        assert memory_budget_bytes(machine.proc, machine.sys, GIB) == 0

    def test_nonsense_is_no_limit(self, machine: Machine) -> None:
        machine.mount_v2().group("sys/fs/cgroup", {"memory.max": "lots", "memory.current": "-5"})
        assert left(machine) is None


class TestQuota:
    def test_v2_the_tightest_ancestor_binds(self, machine: Machine) -> None:
        machine.mount_v2(path="/pod/ctr")
        machine.group("sys/fs/cgroup/pod/ctr", {"cpu.max": "max 100000"})
        machine.group("sys/fs/cgroup/pod", {"cpu.max": "50000 100000"})
        assert quota_cpus(machine.proc, machine.sys) == 0.5

    def test_v1(self, machine: Machine) -> None:
        machine.mount_v1("cpu,cpuacct", "/sys/fs/cgroup/cpu,cpuacct", path="/a")
        base = "sys/fs/cgroup/cpu,cpuacct"
        machine.group(base, {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000})
        assert quota_cpus(machine.proc, machine.sys) is None
        machine.group(f"{base}/a", {"cpu.cfs_quota_us": 150000, "cpu.cfs_period_us": 100000})
        assert quota_cpus(machine.proc, machine.sys) == 1.5

    def test_throttled_time_has_other_units_in_each_version(self, machine: Machine) -> None:
        machine.mount_v1("cpu", "/sys/fs/cgroup/cpu").group(
            "sys/fs/cgroup/cpu", {"cpu.stat": "throttled_time 2000000000"}
        )
        machine.mount_v2("/sys/fs/cgroup/unified")
        machine.group("sys/fs/cgroup/unified", {"cpu.stat": "usage_usec 7\nthrottled_usec 500000"})
        assert throttled_seconds(machine.proc, machine.sys) == pytest.approx(2.5)

    def test_not_told(self, machine: Machine) -> None:
        assert throttled_seconds(machine.proc, machine.sys) is None
        assert quota_cpus(machine.proc, machine.sys) is None


class TestCaches:
    def test_one_cache_for_all(self, machine: Machine) -> None:
        machine.cache("0-1", 1, "48K", "Data").cache("0-1", 2, "2048K").cache("0-1", 3, "266240K")
        assert last_level_cache_bytes(machine.sys, (0, 1)) == 260 << 20

    def test_only_the_caches_within_reach_are_summed(self, machine: Machine) -> None:
        machine.cache("0-3", 3, "32M").cache("4-7", 3, "32M").cache("8-11", 3, "96M")
        assert last_level_cache_bytes(machine.sys, range(8)) == 64 << 20
        assert last_level_cache_bytes(machine.sys, (1, 8)) == 128 << 20

    def test_a_core_without_third_level_counts_its_second(self, machine: Machine) -> None:
        machine.cache("0-3", 2, "1M").cache("0-3", 3, "24M").cache("4-5", 2, "2M")
        assert last_level_cache_bytes(machine.sys, range(6)) == 26 << 20

    def test_instruction_caches_do_not_count(self, machine: Machine) -> None:
        machine.cache("0", 2, "1M").cache("0", 3, "8M", "Instruction")
        assert last_level_cache_bytes(machine.sys, (0,)) == 1 << 20

    def test_without_shared_list_each_cpu_has_its_own(self, machine: Machine) -> None:
        machine.cache("0-1", 3, "8M")
        for cpu in (0, 1):
            (machine.sys / f"devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_list").unlink()
        assert last_level_cache_bytes(machine.sys, (0, 1)) == 16 << 20

    @pytest.mark.parametrize("size", [None, "0K", "big"])
    def test_a_last_level_of_unknown_size_is_unknown_not_the_level_below(
        self, machine: Machine, size: str | None
    ) -> None:
        machine.cache("0-1", 2, "1M").cache("0-1", 3, size)
        assert last_level_cache_bytes(machine.sys, (0, 1)) is None

    def test_missing_is_unknown(self, machine: Machine) -> None:
        assert last_level_cache_bytes(machine.sys, (0,)) is None
        assert last_level_cache_bytes(machine.sys, ()) is None

    @pytest.mark.parametrize(("cpus", "caches"), [(1, 1), (8, 1), (9, 2), (64, 8)])
    def test_the_assumption_grows_with_the_cpus(self, cpus: int, caches: int) -> None:
        assert assumed_cache_bytes(cpus) == caches * (32 << 20)


class TestThreadSets:
    def test_two_plain_cpus(self, machine: Machine) -> None:
        assert thread_sets(machine.sys, (0, 1)) == ((0, 1), (0,))

    def test_one_cpu(self, machine: Machine) -> None:
        assert thread_sets(machine.sys, (5,)) == ((5,),)

    def test_threads_of_a_core_are_counted_once(self, machine: Machine) -> None:
        for core in range(4):
            machine.core(f"{core},{core + 4}")
        assert thread_sets(machine.sys, range(8)) == (tuple(range(8)), (0, 1, 2, 3), (0, 2))

    def test_a_sibling_outside_the_cpuset_does_not_hide_the_core(self, machine: Machine) -> None:
        machine.core("0,4").core("1,5")
        assert thread_sets(machine.sys, (4, 5)) == ((4, 5), (4,))

    def test_intel_hybrid_fast_cores_alone(self, machine: Machine) -> None:
        machine.core("0-1").core("2-3").write("sys/devices/cpu_core/cpus", "0-3\n")
        sets = thread_sets(machine.sys, range(8))
        assert sets == (tuple(range(8)), (0, 2, 4, 5, 6, 7), (0, 4, 6), (0, 2))

    def test_arm_fast_cores_alone(self, machine: Machine) -> None:
        for cpu, capacity in enumerate((400, 400, 400, 400, 1024)):
            machine.write(f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", f"{capacity}\n")
        assert (4,) in thread_sets(machine.sys, range(5))

    def test_the_limit_bounds_every_set_and_is_used(self, machine: Machine) -> None:
        sets = thread_sets(machine.sys, range(64), 12)
        assert max(map(len, sets)) == 12
        assert len(set(sets[0])) == 12
        assert sets[0][-1] > 50, "spread over the machine"

    def test_a_limit_above_the_cpus_changes_nothing(self, machine: Machine) -> None:
        assert thread_sets(machine.sys, (0, 1), 8) == thread_sets(machine.sys, (0, 1))

    @pytest.mark.parametrize(
        ("text", "cpus"), [("0-2,7\n", (0, 1, 2, 7)), ("3", (3,)), ("", ()), ("x", ()), ("1-", ())]
    )
    def test_cpu_lists(self, text: str, cpus: tuple[int, ...]) -> None:
        assert cpu_list(text) == cpus


class TestContention:
    def write(self, machine: Machine, *, some: int, steal: int, throttled: int = 0) -> None:
        machine.write(
            "proc/pressure/cpu", f"some avg10=0.00 avg60=0.00 avg300=0.00 total={some}\nfull avg10=0.00 total=0\n"
        )
        rows = "".join(f"cpu{n} 1 2 3 4 5 6 7 {steal} 0 0\n" for n in range(3))
        machine.write("proc/stat", f"cpu 1 2 3 4 5 6 7 {3 * steal} 0 0\n{rows}intr 5\n")
        machine.write("sys/fs/cgroup/cpu.stat", f"throttled_usec {throttled}\n")

    @pytest.mark.parametrize(
        ("grown", "contended"),
        [
            ({}, False),
            ({"some": 390_000}, False),
            ({"some": 410_000}, True),
            ({"steal": 9}, False),
            ({"steal": 11}, True),
            ({"throttled": 1}, True),
        ],
    )
    def test_limits(self, machine: Machine, grown: dict[str, int], *, contended: bool) -> None:
        now = 100.0
        machine.mount_v2()
        self.write(machine, some=1_000_000, steal=5)
        meter = ContentionMeter(machine.proc, machine.sys, lambda: now, lambda: (0, 2))
        before = meter.read()
        self.write(
            machine,
            some=1_000_000 + grown.get("some", 0),
            steal=5 + grown.get("steal", 0),
            throttled=grown.get("throttled", 0),
        )
        now += 2.0
        assert meter.contended_since(before) is contended

    def test_a_silent_machine_is_not_contended(self, machine: Machine) -> None:
        meter = ContentionMeter(machine.proc, machine.sys, lambda: 1.0)
        assert not meter.contended_since(meter.read())

    def test_units(self, machine: Machine) -> None:
        self.write(machine, some=2_500_000, steal=5)
        assert pressure_seconds(machine.proc) == 2.5
        assert steal_seconds(machine.proc, (0, 2)) == 10 / os.sysconf("SC_CLK_TCK")
        assert steal_seconds(machine.proc, (9,)) is None


class TestRest:
    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("processor : 0\nmodel name\t: Intel(R)  Xeon(R) Processor\n", "Intel(R) Xeon(R) Processor"),
            ("processor : 0\nModel\t\t: Raspberry Pi 5\n", "Raspberry Pi 5"),
            ("processor : 0\n", "unknown"),
        ],
    )
    def test_cpu_model(self, machine: Machine, text: str, name: str) -> None:
        assert cpu_model(machine.write("proc/cpuinfo", text).proc, machine.sys) == name

    def test_cpu_model_of_a_board(self, machine: Machine) -> None:
        machine.write("sys/firmware/devicetree/base/model", "NVIDIA Jetson\0")
        assert cpu_model(machine.proc, machine.sys) == "NVIDIA Jetson"

    def test_huge_pages(self, machine: Machine) -> None:
        assert anonymous_huge_bytes(machine.proc) is None
        assert huge_page_bytes(machine.sys) == 2 << 20
        machine.write("proc/self/smaps_rollup", "Rss: 10 kB\nAnonHugePages:      4096 kB\n")
        machine.write("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "33554432\n")
        assert anonymous_huge_bytes(machine.proc) == 4 << 20
        assert huge_page_bytes(machine.sys) == 32 << 20

    def test_host_info_takes_the_lower_of_machine_and_limit(self, machine: Machine) -> None:
        machine.memory(total=64 * GIB).mount_v2()
        assert host_info(machine.proc, machine.sys).memory_bytes == 64 * GIB
        machine.group("sys/fs/cgroup", {"memory.max": 2 * GIB, "memory.current": 0})
        assert host_info(machine.proc, machine.sys).memory_bytes == 2 * GIB

    def test_this_machine(self) -> None:
        info = host_info(PROC, SYS)
        assert info.cpus == len(allowed_cpus()) >= 1
        assert info.memory_bytes
        assert info.machine == os.uname().machine
        assert 0 <= memory_budget_bytes(PROC, SYS, GIB) <= GIB
        assert thread_sets(SYS, allowed_cpus())[0] == allowed_cpus()
        meter = ContentionMeter(PROC, SYS, lambda: 0.0)
        assert meter.read() is not None


class TestUnreadable:
    def test_a_sysfs_that_may_not_be_looked_at_tells_nothing(self, tmp_path: Path) -> None:
        """In a process of its own, without root's way around permissions."""
        (tmp_path / "sys").mkdir(mode=0o700)
        tmp_path.chmod(0o711)
        code = f"""
import os
from pathlib import Path
from exporter.measure import cgroup, host, topology
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
else:
    os.chmod({str(tmp_path / "sys")!r}, 0)
sys = Path({str(tmp_path / "sys")!r})
assert topology.last_level_cache_bytes(sys, (0, 1)) is None
assert topology.thread_sets(sys, (0, 1))[0] == (0, 1)
assert cgroup.memory_limit_hidden(Path("/proc"), sys) in (True, False)
assert host.memory_budget_bytes(Path("/proc"), sys, 1 << 30) <= 1 << 30
assert host.host_info(Path("/proc"), sys).cpus >= 1
"""
        subprocess.run((sys.executable, "-c", code), check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


class TestLargeMachines:
    def test_genoa_x_has_a_cache_for_each_complex(self, machine: Machine) -> None:
        """12 complexes of 96 MiB: STREAM's rule would ask for 13.5 GiB; a mask within one complex reaches one."""
        for first in range(0, 96, 8):
            machine.cache(f"{first}-{first + 7}", 3, "98304K")
        everything = last_level_cache_bytes(machine.sys, range(96))
        assert everything == 12 * 96 << 20
        assert last_level_cache_bytes(machine.sys, range(8, 12)) == 96 << 20
        assert plan_sizes(everything, GIB) is Reason.CACHE_SUSPECT
        for threads in (48, 96):  # they would like 48 MiB each
            slices = (GIB // threads - MIB) // 3 // 64 * 64
            assert plan_evict(threads, GIB, MIB, huge_pages=True) == EvictPlan(slices, MIB)
        assert plan_evict(512, GIB, MIB, huge_pages=True) is None, "2 MiB for each, of which the cache takes one"

    def test_a_core_has_its_second_level_or_its_share_of_one(self, machine: Machine) -> None:
        assert private_cache_bytes(machine.sys, (0, 1)) == 2 * MIB, "assumed"
        machine.cache("0", 2, "1280K").cache("1", 2, None).cache("4-7", 2, "4M").cache("0-7", 3, "32M")
        machine.cache("0", 1, "48K", "Data").cache("0", 2, "9M", "Instruction")
        assert private_cache_bytes(machine.sys, (0, 1)) == 1280 << 10
        assert private_cache_bytes(machine.sys, (1,)) == 2 * MIB, "no size is told"
        assert private_cache_bytes(machine.sys, range(4, 8)) == MIB
        assert private_cache_bytes(machine.sys, (4, 5)) == 2 * MIB
        assert private_cache_bytes(machine.sys, ()) == 2 * MIB

    def test_two_sockets_have_a_cache_each(self, machine: Machine) -> None:
        machine.cache("0-3", 3, "32M").cache("4-7", 3, "32M")
        assert last_level_cache_bytes(machine.sys, range(8)) == 64 << 20
        assert last_level_cache_bytes(machine.sys, (4, 5)) == 32 << 20

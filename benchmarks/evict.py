"""Small arrays flushed before every pass against arrays that outgrow the cache: do they agree within 3 %?

    python benchmarks/evict.py --pairs 9 --array-mib 1040 --slice-mib 16 --json evict.json

Interleaved runs of both methods with one thread and with all; the ratio is evict / stream, median pass against median
pass. Give --array-mib four times the last-level cache.
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from pairs import Comparison, show

from exporter.measure.membench import Membench, MembenchArrays, Way
from exporter.measure.topology import private_cache_bytes
from exporter.roofline.ceiling import Kernel
from exporter.roofline.passes import Method, Store, sift

ATTEMPTS = 8
PASSES = 8


def rate(arrays: MembenchArrays, kernel: Kernel, way: Way) -> float:
    """GB/s over the median clean pass; a disturbed run is made again."""
    for _ in range(ATTEMPTS):
        run = arrays.run(kernel, way, passes=PASSES, rest_seconds=0.005, budget_seconds=3)
        assert run.error is None, run.error
        clean = sift(run.passes).seconds
        if len(clean) >= PASSES // 2:
            return run.amount / median(clean) / 1e9
    raise SystemExit("this machine is too busy: most passes were disturbed")


def opened(engine: Membench, cpus: Sequence[int], array_bytes: int, refill_bytes: int = 0) -> MembenchArrays:
    """The arrays, or the end."""
    arrays = engine.open(cpus, array_bytes, refill_bytes)
    assert isinstance(arrays, MembenchArrays), arrays
    return arrays


def main() -> None:
    """Runs the pairs and prints the table."""
    cpus = sorted(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--array-mib", type=int, default=1040)
    parser.add_argument("--slice-mib", type=float, default=16)
    parser.add_argument("--refill-mib", type=float, default=private_cache_bytes(Path("/sys"), cpus) / (1 << 20))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine, rows = Membench(), []
    for used in (cpus[:1], cpus):
        figures: dict[tuple[Kernel, Method], list[float]] = defaultdict(list)
        benches = {
            Method.STREAM: opened(engine, used, options.array_mib << 20),
            Method.EVICT: opened(
                engine, used, int(len(used) * options.slice_mib * (1 << 20)), int(options.refill_mib * (1 << 20))
            ),
        }
        for _ in range(options.pairs):
            for kernel in Kernel:
                store = Store.PLAIN if kernel is Kernel.READ else Store.NT
                for method, arrays in benches.items():
                    figures[kernel, method].append(rate(arrays, kernel, Way(engine.isas[0], store, method)))
        for arrays in benches.values():
            arrays.close()
        rows += [
            Comparison(f"{k}, {len(used)} threads", figures[k, Method.EVICT], figures[k, Method.STREAM], "GB/s")
            for k in Kernel
        ]
    sizes = f"{options.slice_mib:g} MiB a thread and array, {options.refill_mib:g} MiB to refill its cache"
    show(f"evict (ours) / stream (theirs), {sizes}", rows, options.json)


if __name__ == "__main__":
    main()

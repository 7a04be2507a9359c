"""Our GGUF header reader beside the `gguf` package's: time and memory for the same file.

Run: python benchmarks/gguf_header.py MODEL.gguf [--rounds 5]

Each round reads the file once with both, in fresh processes and in turns who is first; the medians are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

READERS = ("exporter", "gguf")
SAMPLING_SECONDS = 0.002
MIB = 1 << 20
PAGE_BYTES = 4096
"""Growth below a page shows as 0."""


def rss_bytes() -> int:
    """What this process holds in memory now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakRss:
    """Samples the resident memory from a thread: not every kernel resets or even shows a high-water mark."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._before = self._peak = rss_bytes()
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLING_SECONDS):
            self._peak = max(self._peak, rss_bytes())

    def end(self) -> int:
        """The growth since the start, bytes."""
        self._peak = max(self._peak, rss_bytes())
        self._stop.set()
        self._thread.join()
        return self._peak - self._before


def read_once(reader: str, model: Path) -> dict[str, float]:
    """Reads the header in this process, its modules already imported.

    Returns:
        Seconds (measured without the sampling thread), extra bytes, and the sum of the tensors' bytes.
    """
    if reader == "gguf":
        from gguf import GGUFReader  # noqa: PLC0415 - each child imports its own reader only

        def read() -> int:
            return sum(int(tensor.n_bytes) for tensor in GGUFReader(model).tensors)
    else:
        from exporter.measure.gguf import read_gguf  # noqa: PLC0415 - the same
        from exporter.measure.gguf_types import GgufProblem  # noqa: PLC0415 - the same

        def read() -> int:
            found = read_gguf(model)
            if isinstance(found, GgufProblem):
                raise SystemExit(found.message)
            return found.weight_bytes

    peak = PeakRss()
    weight_bytes = read()
    memory = peak.end()
    begin = time.perf_counter()
    read()
    return {"seconds": time.perf_counter() - begin, "memory_bytes": memory, "weight_bytes": weight_bytes}


def child(reader: str, model: Path) -> dict[str, float]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, str(model), "--reader", reader]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    """Compares the readers, or is one of the children."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader:
        sys.stdout.write(json.dumps(read_once(arguments.reader, arguments.model)))
        return
    results: dict[str, list[dict[str, float]]] = {reader: [] for reader in READERS}
    for number in range(arguments.rounds):
        for reader in READERS if number % 2 else READERS[::-1]:
            results[reader].append(child(reader, arguments.model))
    if len({result["weight_bytes"] for reader in READERS for result in results[reader]}) != 1:
        raise SystemExit("the readers disagree on the sum of the tensors' bytes")
    for reader in READERS:
        seconds = statistics.median(result["seconds"] for result in results[reader])
        memory = statistics.median(result["memory_bytes"] for result in results[reader])
        sys.stdout.write(f"{reader:9} {seconds * 1e3:9.1f} ms {memory / MIB:8.1f} MiB\n")
    for name, what in (("seconds", "time"), ("memory_bytes", "memory")):
        pairs = zip(results["gguf"], results["exporter"], strict=True)
        ratios = [theirs[name] / (ours[name] or PAGE_BYTES) for theirs, ours in pairs]
        sys.stdout.write(
            f"{what}: the package takes {statistics.median(ratios):.0f} x (median of {len(ratios)} pairs)\n"
        )


if __name__ == "__main__":
    main()

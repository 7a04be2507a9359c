"""Grafana's own transformation code in node, on frames as its Prometheus data source makes them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from real import missing

HERE = Path(__file__).parent
_CACHE = Path.home() / ".cache" / "roofline-exporter"

Series = tuple[dict[str, str], float]


def grafana_data() -> Path:
    """Where node finds Grafana's code: installed once into the user's cache, in one file that node 18 can load too."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        missing("node and npm are not on the PATH")
    pinned = (HERE / "package.json").read_bytes()
    installed = _CACHE / f"grafana-data-{sha256(pinned).hexdigest()[:12]}"
    if not installed.exists():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=_CACHE) as scratch:
            (Path(scratch) / "package.json").write_bytes(pinned)
            entry, bundle = Path(scratch) / "entry.cjs", Path(scratch) / "bundle"
            entry.write_text('module.exports = require("@grafana/data");')
            _done(npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", cwd=scratch)
            esbuild = Path(scratch) / "node_modules" / "esbuild" / "bin" / "esbuild"
            output = bundle / "@grafana" / "data.js"
            _done(node, esbuild, str(entry), "--bundle", "--platform=node", f"--outfile={output}", cwd=scratch)
            with suppress(OSError):  # another run was faster
                bundle.rename(installed)
    return installed


def _done(*command: str | Path, cwd: str) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=280)
    if done.returncode != 0:
        missing(f"{command[1]} failed for @grafana/data: {done.stderr[-500:]}")


def table_frames(answers: dict[str, list[Series]], time_ms: int = 0) -> list[dict[str, Any]]:
    """Frames of instant queries in table format: Time, a column for each label, and the value.

    A query without an answer has no frame. The value's column carries the query's letter, unless only one answered.
    """
    answered = {ref_id: series for ref_id, series in answers.items() if series}
    return [
        {
            "refId": ref_id,
            "fields": [
                {"name": "Time", "type": "time", "values": [time_ms] * len(series)},
                *(
                    {"name": label, "type": "string", "values": [labels.get(label, "") for labels, _ in series]}
                    for label in sorted({label for labels, _ in series for label in labels})
                ),
                {
                    "name": "Value" if len(answered) == 1 else f"Value #{ref_id}",
                    "type": "number",
                    "values": [value for _, value in series],
                },
            ],
        }
        for ref_id, series in answered.items()
    ]


@dataclass(frozen=True, slots=True)
class Shown:
    """What is left of a panel after its transformations.

    Attributes:
        frames: The columns of each frame, by display name.
        overridden: For each override, the columns that it matches.
        series: For each series of a chart, its name and coordinates; None for one that cannot be drawn.
        unknown_units: Units that Grafana does not know.
    """

    frames: list[dict[str, list[Any]]]
    overridden: list[list[str]]
    series: list[dict[str, Any] | None]
    unknown_units: list[str]

    def lines(self) -> dict[str, list[tuple[float, float]]]:
        """The points of each series that can be drawn: those with both coordinates."""
        return {
            one["name"]: [(x, y) for x, y in zip(one["x"], one["y"], strict=True) if x is not None and y is not None]
            for one in self.series
            if one is not None
        }


def run(jobs: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[Shown]:
    """What each panel shows of its frames."""
    asked = [
        {
            "frames": frames,
            "transformations": panel.get("transformations", []),
            "overrides": panel["fieldConfig"]["overrides"],
            "series": panel["options"].get("series", []),
            "units": units_of(panel),
        }
        for panel, frames in jobs
    ]
    done = subprocess.run(
        ("node", str(HERE / "transform.cjs")),
        input=json.dumps(asked),
        env={**os.environ, "NODE_PATH": str(grafana_data())},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [
        Shown(one["frames"], one["overridden"], one["series"], one["unknownUnits"]) for one in json.loads(done.stdout)
    ]


def units_of(panel: dict[str, Any]) -> list[str]:
    """Every unit that a panel names."""
    config = panel["fieldConfig"]
    properties = [p for override in config["overrides"] for p in override["properties"]]
    return [config["defaults"]["unit"], *(p["value"] for p in properties if p["id"] == "unit")]

"""Writes the dashboards: `python grafana/generate.py`; with `--check`, tells which files are out of date."""

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from board.decode import decode_roofline
from board.fleet import fleet

DIRECTORY: Final = Path(__file__).parent / "dashboards"


def files() -> dict[Path, str]:
    """Every dashboard's file and its text, the same at every run."""
    made = {"decode-roofline.json": decode_roofline(), "fleet.json": fleet()}
    return {
        DIRECTORY / name: json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        for name, board in made.items()
    }


def outdated() -> list[Path]:
    """Files that differ from what would be written, and those that nothing writes."""
    wanted = files()
    differ = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    return [*differ, *sorted(set(DIRECTORY.glob("*.json")) - set(wanted))]


def main() -> int:
    """Write, or check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a file is out of date")
    if parser.parse_args().check:
        for path in (found := outdated()):
            print(f"{path} is out of date: run python grafana/generate.py", file=sys.stderr)
        return 1 if found else 0
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

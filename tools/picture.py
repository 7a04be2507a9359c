#!/usr/bin/env python3
"""Writes docs/roofline.svg: the first roofline on the page of a running exporter, with its colours beside it.

`python tools/picture.py http://127.0.0.1:10470`, while `make demo` runs.
"""

import re
import sys
from pathlib import Path
from typing import Final
from urllib.request import urlopen

PICTURE: Final = Path(__file__).parent.parent / "docs" / "roofline.svg"
STYLE: Final = """<style>
  text { fill: #5c6877; font: 11px system-ui, sans-serif; } .name { fill: #1b2430; } .grid { stroke: #dfe4ea; }
  .roof { fill: none; stroke: #5c6877; stroke-width: 1.5; stroke-dasharray: 5 4; }
  .reference { stroke: #2f6fb3; stroke-width: 2.5; stroke-dasharray: none; }
  circle { fill: #d9a13b; stroke: #fff; stroke-width: 1.5; }
</style>
<rect width="100%" height="100%" fill="#fff"/>"""


def main() -> None:
    """Reads the page and writes the picture."""
    if len(sys.argv) != 2:  # noqa: PLR2004
        sys.exit("usage: picture.py URL-OF-A-RUNNING-EXPORTER")
    with urlopen(sys.argv[1], timeout=10) as answer:  # noqa: S310 - the user's own exporter
        page = answer.read().decode()
    found = re.search(r"<svg (viewBox[^>]*)>(.*?)</svg>", page, re.DOTALL)
    if found is None:
        sys.exit("there is no roofline on that page yet: it needs a ceiling and a sample")
    lines = [line.strip() for line in found[2].splitlines() if line.strip()]
    text = "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {found[1]}>', STYLE, *lines, "</svg>", ""])
    PICTURE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

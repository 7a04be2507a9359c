"""Every file that the pages for people link to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "grafana/README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if not link.startswith(("http://", "https://", "#")):
            assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"


def test_the_readme_links_to_the_picture_and_the_pages() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("docs/roofline.svg", "docs/metrics.md", "docs/runbook.md", "docs/servers.md", "docs/verdict.md"):
        assert name in text

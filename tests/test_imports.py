"""Imports run one way: cli -> service -> measure, present -> roofline; config is a leaf that roofline never reads."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "exporter"
ALLOWED = {
    "__main__": {"cli"},
    "cli": {"options", "service", "measure", "present", "roofline", "config"},
    "options": {"service", "config"},
    "service": {"service", "measure", "present", "roofline", "config"},
    "measure": {"measure", "roofline", "config"},
    "present": {"present", "roofline", "config"},
    "roofline": {"roofline"},
    "config": {"config"},
}


def rooms(path: Path) -> set[str]:
    """The rooms of the house that a module imports from, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "exporter" else [module]
        found |= {name.split(".")[1] for name in names if name.startswith("exporter.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room != "__init__":
        assert rooms(path) <= ALLOWED[room]


def test_roofline_uses_only_the_standard_library_and_no_clock() -> None:
    """Pure arithmetic: nothing third-party, no time, no files, no network."""
    forbidden = {"time", "datetime", "os", "pathlib", "socket", "asyncio", "random", "subprocess", "io"}
    for path in (PACKAGE / "roofline").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top == "exporter" or (top in sys.stdlib_module_names and top not in forbidden), (path, name)


def test_every_module_fits_one_sitting() -> None:
    for path in PACKAGE.rglob("*.py"):
        # The metric table is read by looking a name up, not from top to bottom.
        limit = 400 if path.name == "metric_table.py" else 300
        assert len(path.read_text(encoding="utf-8").splitlines()) <= limit, path

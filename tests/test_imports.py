"""The package's imports point one way, and what must start at once does not import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import starquill

PACKAGE = Path(__file__).parent.parent / "starquill"
# Each layer may import those before it; folders that share a layer do not import each other.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"types", "errors"}),
    frozenset({"placement", "kernels"}),
    frozenset({"quant"}),
    frozenset({"nn"}),
    frozenset({"models"}),
    frozenset({"checkpoint"}),
    frozenset({"isq", "calibration", "adapters", "anymoe"}),
    frozenset({"distilling"}),
    frozenset({"engine"}),
    frozenset({"quantizing"}),
    frozenset({"placing"}),
    frozenset({"settling"}),
    frozenset({"requantizing", "merging"}),
    frozenset({"loading"}),
    frozenset({"server"}),
    frozenset({"batch"}),
    frozenset({"cli"}),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
ROOT = frozenset({"__init__", "__main__"})
ALLOWED_SIDEWAYS = {("anymoe", "adapters")}
FILES = sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    """The folder or file directly below the package that `path` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _home(name: str) -> str:
    """The part that a public name of the package comes from."""
    if name in RANK:
        return name
    home: str = getattr(getattr(starquill, name), "__module__", "starquill.__init__")
    return home.split(".")[1]


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module == "starquill":
            found |= {_home(alias.name) for alias in node.names} - ROOT
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        found |= {n.split(".")[1] for n in names if n.startswith("starquill.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_left(path: Path) -> None:
    here = part(path)
    if here in ROOT:
        return
    for there in imported_parts(path) - {here}:
        sideways = (here, there) in ALLOWED_SIDEWAYS
        assert RANK[there] < RANK[here] or sideways, f"{path} imports {there}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") < 500
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{path}: {node.name} is too long"
            positional = [a for a in node.args.args if a.arg not in ("self", "cls")]
            verb = any(
                isinstance(d, ast.Name) and d.id == "expand_options" for d in node.decorator_list
            )
            assert len(positional) <= 5 or verb, f"{path}: {node.name} takes too many"


@pytest.mark.parametrize(
    "module", ["starquill", "starquill.types", "starquill.cli.app", "starquill.server.schema"]
)
def test_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

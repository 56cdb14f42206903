"""The documentation's commands run as written, and its links lead somewhere.

A block marked `sh` or `python` runs in a folder of the page's own, in the page's order;
a block marked `file=NAME` is written to that file instead.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\S*)[ ]*(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
# Blocks that fetch a model of many gigabytes, or run this very test suite, cannot run here.
NEEDS_DOWNLOAD = "bigcode/"
RUNS_THIS = "./scripts/test"
NEEDS = "needs="  # a module that a block needs, which may not be installed


def runnable(page: Path) -> list[tuple[str, str, str]]:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [b for b in blocks if b[0] in ("sh", "python") or b[1].startswith("file=")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_page_runs_as_written(page: Path, tmp_path: Path) -> None:
    for name in ("scripts", "examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for language, setting, code in runnable(page):
        if NEEDS_DOWNLOAD in code or RUNS_THIS in code:
            continue
        if setting.startswith(NEEDS) and find_spec(setting.removeprefix(NEEDS)) is None:
            continue
        if setting.startswith("file="):
            (tmp_path / setting.removeprefix("file=")).write_text(code, encoding="utf-8")
            continue
        command = ["sh", "-euc", code] if language == "sh" else [sys.executable, "-c", code]
        result = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert result.returncode == 0, f"{page.name}:\n{code}\n{result.stderr}"
        assert result.stdout.strip() or language == "python", (
            f"{page.name} printed nothing:\n{code}"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_pages_name_exist(page: Path) -> None:
    """A path in backticks below one of our folders is a real one."""
    text = page.read_text(encoding="utf-8")
    for name in re.findall(
        r"`((?:starquill|tests|tools|benchmarks|docs|scripts|examples)/[\w./-]+)`", text
    ):
        assert (ROOT / name).exists(), f"{page.name} names {name}"

"""The package installs where no C++ compiler works, runs there, and says once what it lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake on the PATH")
def test_a_wheel_without_a_compiler(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*pip, "--wheel-dir", str(tmp_path), str(ROOT)],
        env={**os.environ, "CC": "false", "CXX": "false"},
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import starquill\n"
        "engine = starquill.Engine(starquill.load('default', quant='4'))\n"
        "engine.complete('import ', starquill.SamplingParams(max_tokens=2))\n"
        "print(starquill.__file__)\n"
    )
    # Without `site` (-S) an editable install does not lead the import to the working tree.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{sysconfig.get_path('purelib')}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(site)
    assert done.stderr.count("slower") == 1
    assert "native kernels are missing" in done.stderr

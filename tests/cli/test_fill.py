"""`starquill fill`: where the hole is, what the model sees, and what becomes of the file."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pygments.lexers import PythonLexer
from torch import Tensor

from starquill.cli.app import main
from starquill.cli.printing import HighlightPrinter
from starquill.engine.engine import Engine
from starquill.engine.fim import fill_request
from starquill.engine.loaded import LoadedModel
from starquill.loading import load
from starquill.models.spec import StepBatch
from starquill.types import ContextFile, Delta, GenerateRequest, Hole, SamplingParams
from tests import tiny

CONTROLS = (0, 1, 2, 3, 4, 5, 6)
CONTEXT = 2000
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
Script = Callable[[bytes], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    raw = tiny.config(max_position_embeddings=CONTEXT)
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"), raw)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(folder)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(content: bytes) -> Path:
        path = tmp_path / "code.py"
        path.write_bytes(content)
        return path

    return write


def fill(folder: Path, *arguments: str | Path, count: int = 6) -> int:
    """Run the verb; no control token is written, so that there always is a middle."""
    bias = [word for token in CONTROLS for word in ("--logit-bias", f"{token}=-100")]
    return main(["fill", *map(str, arguments), "-m", str(folder), "-n", str(count), *bias])


def middle(
    loaded: LoadedModel, prefix: str, suffix: str, *context: ContextFile, **names: str
) -> str:
    """What the engine itself writes into the same hole."""
    params = SamplingParams(max_tokens=6, logit_bias=dict.fromkeys(CONTROLS, -100.0))
    return Engine(loaded).fill(Hole(prefix, suffix, context, **names), params)


class Follower:
    """Stands in for a model: writes what a test chooses, and remembers what it was asked."""

    def __init__(self, monkeypatch: Patch, loaded: LoadedModel, text: str) -> None:
        self.requests: list[GenerateRequest] = []
        tokens = [*loaded.require_tokenizer().encode(text), 0]
        original = Engine.generate

        def generate(engine: Engine, request: GenerateRequest) -> Any:
            self.requests.append(request)
            model = tiny.scripted(engine.model, tokens, len(request.prompt_ids))
            return original(Engine(model), request)

        monkeypatch.setattr("starquill.cli.run.load", lambda *_, **__: loaded)
        monkeypatch.setattr("starquill.cli.run.Engine.generate", generate)


# --- where the hole is ---

LINES = b"one\n  two\n\nfour"


@pytest.mark.parametrize(
    "place",
    [
        (LINES, "1", "one"),
        (LINES, "2", "one\n  two"),
        (LINES, "3", "one\n  two\n"),
        (LINES, "4", "one\n  two\n\nfour"),
        (LINES, "1:1", ""),
        (LINES, "2:3", "one\n  "),
        (LINES, "2:6", "one\n  two"),
        (LINES, "4:5", "one\n  two\n\nfour"),
        (b"one\n", "2", "one\n"),
        (b"one\n", "2:1", "one\n"),
        (b"", "1", ""),
        (b"", "1:1", ""),
        (b"one\r\ntwo\r\n", "1", "one"),
        (b"one\r\ntwo\r\n", "2:2", "one\r\nt"),
        (b"one\r\ntwo\r\n", "2:4", "one\r\ntwo"),
        (b"one\r\ntwo\r\n", "3", "one\r\ntwo\r\n"),
        ("é😀x\n".encode(), "1:3", "é😀"),
        (b"a\x0cb\x0bc\n", "1:4", "a\x0cb"),
        (b"a <fill> b\n", "1:2", "a"),
    ],
)
def test_at(
    loaded: LoadedModel,
    capsys: Capture,
    monkeypatch: Patch,
    script: Script,
    place: tuple[bytes, str, str],
) -> None:
    content, at, prefix = place
    asked = Follower(monkeypatch, loaded, "M")
    path = script(content)
    assert main(["fill", str(path), "--at", at]) == 0
    assert capsys.readouterr() == ("M", "")
    encode = loaded.require_tokenizer().encode
    suffix = content.decode()[len(prefix) :]
    assert asked.requests[0].prompt_ids == (1, *encode(prefix), 3, *encode(suffix), 2)
    assert main(["fill", str(path), "--at", at, "--in-place"]) == 0
    assert path.read_bytes() == (prefix + "M" + suffix).encode()


@pytest.mark.parametrize("content", ["a(<fill>)\n", "<fill>", "<fill>\r\n", "x\n<fill>"])
def test_marker(
    loaded: LoadedModel, capsys: Capture, monkeypatch: Patch, script: Script, content: str
) -> None:
    prefix, suffix = content.split("<fill>")
    expected, folder = middle(loaded, prefix, suffix), loaded.folder
    path = script(content.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    for place in ([path], ["--prompt", content], ["--prompt", "-"]):
        assert fill(folder, *place) == 0
        assert capsys.readouterr() == (expected, "")
    assert path.read_bytes() == content.encode()
    assert fill(folder, path, "-i") == 0
    assert path.read_bytes() == (prefix + expected + suffix).encode()


def test_prefix_and_suffix_files(
    folder: Path, loaded: LoadedModel, capsys: Capture, tmp_path: Path
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_bytes(b"a = (\r\n <fill>")
    after.write_bytes(b"\n)")
    for place, expected in (
        (("--prefix-file", before, "--suffix-file", after), ("a = (\r\n <fill>", "\n)")),
        (("--prefix-file", before), ("a = (\r\n <fill>", "")),
        (("--suffix-file", after), ("", "\n)")),
    ):
        assert fill(folder, *place) == 0
        assert capsys.readouterr().out == middle(loaded, *expected)


def test_code_that_mentions_control_tokens_is_data(
    loaded: LoadedModel, monkeypatch: Patch, script: Script
) -> None:
    asked = Follower(monkeypatch, loaded, "M")
    text = 'A = "<fim_middle>"\n\nB = "<|endoftext|><fim_prefix><file_sep>"\n'
    path = script(text.encode())
    assert main(["fill", str(path), "--at", "2", "-i", "--context", str(path)]) == 0
    ids = asked.requests[0].prompt_ids
    assert [i for i in ids if i in CONTROLS] == [5, 6, 6, 1, 3, 2]
    assert path.read_text() == text.replace("\n\n", "\nM\n")


@pytest.mark.parametrize("order", ["psm", "spm"])
def test_the_order_reaches_the_model(order: str, capsys: Capture) -> None:
    hole = Hole("def f(x):\n    return ", "\n\nprint(f(2))\n")
    arguments = ["--prompt", f"{hole.prefix}<fill>{hole.suffix}", "--fim-order", order, "--json"]
    assert main(["fill", *arguments, "--max-tokens", "8"]) == 0
    shown = json.loads(capsys.readouterr().out)
    loaded = load("default")
    made, _ = fill_request(loaded, hole, SamplingParams(max_tokens=8), order=order)
    expected = "".join(delta.text for delta in Engine(loaded).generate(made))
    assert shown["text"] == expected


# --- context files ---


def test_context_files_are_named_from_the_checkouts_root(
    folder: Path, loaded: LoadedModel, capsys: Capture, tmp_path: Path
) -> None:
    root = tmp_path / "project"
    (root / ".git").mkdir(parents=True)
    (root / "pkg").mkdir()
    hole, near, far = root / "pkg" / "m.py", root / "pkg" / "u.py", tmp_path / "far.py"
    hole.write_text("x = \n")
    near.write_text("U = 1\n")
    far.write_text("F = 1\n")
    files = (ContextFile("pkg/u.py", "U = 1\n"), ContextFile("far.py", "F = 1\n"))
    assert fill(folder, hole, "--at", "1", "--context", near, "--context", far) == 0
    expected = middle(loaded, "x = ", "\n", *files, path="pkg/m.py", repo_name="project")
    assert capsys.readouterr() == (expected, "")
    assert fill(folder, hole, "--at", "1", "--context", near, "--repo-name", "other/name") == 0
    expected = middle(loaded, "x = ", "\n", files[0], path="pkg/m.py", repo_name="other/name")
    assert capsys.readouterr().out == expected


def test_what_was_left_out_is_told(tmp_path: Path, capsys: Capture, script: Script) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")  # a context of 64
    path = script(b"a" * 100 + b"\n" + b"b" * 100)
    assert fill(folder, path, "--at", "1", "--context", path) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: ")
    assert "code.py" in warnings[0]
    cut = re.search(
        r"first (\d+) tokens of the prefix.*last (\d+) tokens of the suffix", warnings[0]
    )
    assert cut is not None
    controls = 3
    assert 201 - int(cut[1]) - int(cut[2]) + controls + 6 == 64


# --- in place ---


@given(
    before=st.text(alphabet="ab \té\r\n<>\ufeff", max_size=12),
    after=st.text(alphabet="ab \té\r\n<>\ufeff", max_size=12),
)
@settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_bytes_around_the_hole_are_unchanged(
    folder: Path, loaded: LoadedModel, script: Script, before: str, after: str
) -> None:
    path = script(f"{before}<fill>{after}".encode())
    assert fill(folder, path, "--in-place") == 0
    content, ends = path.read_bytes(), (before.encode(), after.encode())
    assert content.startswith(ends[0])
    assert content.endswith(ends[1])
    written = content[len(ends[0]) : len(content) - len(ends[1])].decode()
    expected = middle(loaded, before, after)
    assert written.replace("\r\n", "\n") == expected.replace("\r\n", "\n")


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755, 0o640])
def test_the_files_mode_is_kept(folder: Path, script: Script, mode: int) -> None:
    path = script(b"a\n")
    path.chmod(mode)
    assert fill(folder, path, "--at", "1", "-i") == 0
    assert path.read_bytes() != b"a\n"
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_symbolic_link_stays_one(folder: Path, tmp_path: Path, script: Script) -> None:
    path = script(b"a\n")
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.py"
    link.symlink_to(Path("..") / "code.py")
    assert fill(folder, link, "--at", "1", "-i") == 0
    assert link.is_symlink()
    assert path.read_bytes() != b"a\n"
    assert os.listdir(tmp_path / "elsewhere") == ["link.py"]  # noqa: PTH208


def test_without_in_place_the_file_is_left_alone(folder: Path, script: Script) -> None:
    path = script(b"a\n")
    assert fill(folder, path, "--at", "1") == 0
    assert path.read_bytes() == b"a\n"


def disk_full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "step", ["os.fsync", "pathlib.Path.replace", "os.fdopen", "pathlib.Path.chmod"]
)
def test_a_failed_write_leaves_the_file_and_nothing_else(
    folder: Path, capsys: Capture, monkeypatch: Patch, script: Script, step: str
) -> None:
    path = script(b"a\n")
    monkeypatch.setattr(step, disk_full)
    code = fill(folder, path, "--at", "1", "-i")
    monkeypatch.undo()
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("error: ")
    assert "No space left" in err
    assert err.count("\n") == 1
    assert path.read_bytes() == b"a\n"
    assert [p.name for p in path.parent.iterdir()] == ["code.py"]


def test_a_failed_write_names_the_users_file(
    folder: Path, capsys: Capture, monkeypatch: Patch, script: Script
) -> None:
    path = script(b"a\n")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path.parent / ".code.py.x1y2"))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert fill(folder, path, "--at", "1", "-i") == 2
    err = capsys.readouterr().err
    assert f"{path}" in err
    assert "x1y2" not in err


class Interrupting(tiny.ScriptedModel):
    """A script in whose middle the user presses Ctrl-C."""

    def hidden(self, batch: StepBatch) -> Tensor:
        if int(batch.positions[0, -1]) >= self.prompt + 1:
            raise KeyboardInterrupt
        return super().hidden(batch)


def test_ctrl_c_leaves_the_file_and_says_so(
    loaded: LoadedModel, capsys: Capture, monkeypatch: Patch, script: Script
) -> None:
    path = script(b"a\n")
    model = Interrupting(loaded.require_tokenizer().encode("xyz"), loaded.config.vocab_size, 5)
    interrupted = replace(loaded, model=model)
    monkeypatch.setattr("starquill.cli.run.load", lambda *_, **__: interrupted)
    assert main(["fill", str(path), "--at", "1", "-i"]) == 130
    out, err = capsys.readouterr()
    assert out == "xy"
    assert "unchanged" in err
    assert path.read_bytes() == b"a\n"
    assert [p.name for p in path.parent.iterdir()] == ["code.py"]


class LeftReader(io.StringIO):
    """A standard output whose reader has gone."""

    def write(self, _: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_WRONLY)


def test_a_reader_that_leaves_does_not_silently_lose_the_edit(
    folder: Path, monkeypatch: Patch, script: Script
) -> None:
    """As in `starquill fill -i ... | head -c 1`: the file is filled, or the exit code says no."""
    path = script(b"a\n")
    monkeypatch.setattr(sys, "stdout", LeftReader())
    try:
        code: Any = fill(folder, path, "--at", "1", "-i")
    except SystemExit as leaving:
        code = leaving.code
    assert code != 0 or path.read_bytes() != b"a\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a\r\n<fill>b\r\n", b"a\r\nx\r\ny\r\nb\r\n"),
        (b"a\n<fill>b\n", b"a\nx\ny\nb\n"),
        (b"a\r\n<fill>b\n", b"a\r\nx\ny\nb\n"),
        (b"a<fill>b", b"ax\ny\nb"),
    ],
)
def test_line_endings_are_the_files(
    loaded: LoadedModel, monkeypatch: Patch, script: Script, content: bytes, expected: bytes
) -> None:
    """Of a file whose lines all end alike."""
    Follower(monkeypatch, loaded, "x\ny\n")
    path = script(content)
    assert main(["fill", str(path), "-i"]) == 0
    assert path.read_bytes() == expected


def test_an_edit_made_meanwhile_is_not_lost(
    loaded: LoadedModel, capsys: Capture, monkeypatch: Patch, script: Script
) -> None:
    path = script(b"a\n")
    Follower(monkeypatch, loaded, "M")
    original = Engine.generate

    def generate(engine: Engine, request: GenerateRequest) -> Any:
        path.write_bytes(b"edited\n")
        return original(engine, request)

    monkeypatch.setattr("starquill.cli.run.Engine.generate", generate)
    assert main(["fill", str(path), "--at", "1", "-i"]) == 2
    assert "changed" in capsys.readouterr().err
    assert path.read_bytes() == b"edited\n"


def test_in_place_with_json(
    folder: Path, loaded: LoadedModel, capsys: Capture, script: Script
) -> None:
    path = script(b"a\nb")
    assert fill(folder, path, "--at", "1", "-i", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == middle(loaded, "a", "\nb")
    assert path.read_bytes() == f"a{result['text']}\nb".encode()


class CountingLexer(PythonLexer):  # type: ignore[misc]  # Pygments has no types
    """Remembers how many characters it was given."""

    read = 0

    def get_tokens_unprocessed(self, text: str, *stack: Any) -> Any:
        self.read += len(text)
        return super().get_tokens_unprocessed(text, *stack)


def test_highlighting_does_not_read_a_long_file_again_for_every_token(capsys: Capture) -> None:
    before, lexer = "x = 1\n" * 20_000, CountingLexer(ensurenl=False)
    printer = HighlightPrinter(lexer, before)
    for _ in range(50):
        printer.write(Delta("r", 1, "y = 2\n"))
    printer.finish()
    assert re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out) == "y = 2\n" * 50 + "\n"
    assert lexer.read < 10 * len(before)


# --- what cannot be understood ---


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ([], "expected one of"),
        (["FILE", "--prompt", "a<fill>"], "expected one of"),
        (["FILE", "--prefix-file", "FILE"], "expected one of"),
        (["--prompt", "a<fill>", "--suffix-file", "FILE"], "expected one of"),
        (["--prompt", "a<fill>", "--at", "1"], "--at needs FILE"),
        (["--prefix-file", "FILE", "--at", "1"], "--at needs FILE"),
        (["--prompt", "a<fill>", "-i"], "--in-place needs FILE"),
        (["--prefix-file", "FILE", "-i"], "--in-place needs FILE"),
        (["FILE"], "--at LINE"),
        (["--prompt", "ab"], "0 <fill> markers (expected one"),
        (["--prompt", "<fill><fill>"], "2 <fill> markers (expected one"),
        (["FILE", "--at", "0"], "line 0"),
        (["FILE", "--at", "4"], "lines 1 to 3"),
        (["FILE", "--at", "1:0"], "columns 1 to 4"),
        (["FILE", "--at", "1:5"], "columns 1 to 4"),
        (["FILE", "--at", "1:2:3"], "LINE:COL"),
        (["FILE", "--at", "-1"], "LINE:COL"),
        (["FILE", "--at", "two"], "LINE:COL"),
        (["FILE", "--at", "1:"], "LINE:COL"),
        (["FILE", "--at", ""], "LINE:COL"),
        (["FILE", "--at", " 1"], "LINE:COL"),
        (["FILE", "--at", "9" * 5000], "--at"),
        (["FILE", "--at", "1:" + "9" * 5000], "--at"),
        (["FILE", "--at", "1", "-n", "-3"], "max_tokens"),
        (["FILE", "--at", "1", "-n", "2000"], "2000"),
        (["FILE", "--at", "1", "--context", "FOLDER"], "cannot be read"),
        (["FILE", "--at", "1", "--context", "MISSING"], "cannot be read"),
        (["FOLDER", "--at", "1"], "cannot be read"),
        (["MISSING", "--at", "1"], "cannot be read"),
        (["BINARY", "--at", "1"], "not UTF-8"),
        (["FILE", "--at", "1", "--context", "BINARY"], "not UTF-8"),
        (["--prefix-file", "BINARY"], "not UTF-8"),
    ],
)
def test_mistakes(
    folder: Path, capsys: Capture, tmp_path: Path, place: list[str], says: str
) -> None:
    """One line that says what was found and expected; the file stays as it was."""
    names = {name: tmp_path / name.lower() for name in ("FILE", "FOLDER", "MISSING", "BINARY")}
    names["FILE"].write_bytes(b"one\ntwo\n")
    names["FOLDER"].mkdir()
    names["BINARY"].write_bytes(b"ab\xff")
    words = [str(names.get(word, word)) for word in place]
    code = main(["fill", *words, "-m", str(folder), *([] if "-n" in words else ["-n", "3"])])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert names["FILE"].read_bytes() == b"one\ntwo\n"


def test_advice_for_a_prompt_does_not_name_an_option_for_files(capsys: Capture) -> None:
    assert main(["fill", "--prompt", "ab"]) == 2
    assert "--at" not in capsys.readouterr().err

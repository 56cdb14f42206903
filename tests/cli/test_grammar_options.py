"""`starquill generate` with --json-schema, --regex and --grammar."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from starquill.cli.app import main
from tests import tiny

Capture = pytest.CaptureFixture[str]
WILD = ("-p", "x ", "--temp", "3", "-n", "900")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny.config(max_position_embeddings=1000)
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"), raw)


def written(folder: Path, capsys: Capture, *options: str) -> str:
    assert main(["generate", "-m", str(folder), *WILD, *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("heal", ["--heal", "--no-heal"])
def test_a_json_schema(folder: Path, tmp_path: Path, capsys: Capture, heal: str) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": [1, "é"]}, "maxItems": 3}', "utf-8")
    for seed in range(4):
        found = written(folder, capsys, "--json-schema", str(schema), "--seed", str(seed), heal)
        assert len(json.loads(found)) <= 3
        assert set(json.loads(found)) <= {1, "é"}


def test_a_regex(folder: Path, capsys: Capture) -> None:
    for seed in range(4):
        found = written(folder, capsys, "--regex", "[a-c]{2,9};", "--seed", str(seed))
        assert re.fullmatch("[a-c]{2,9};", found)


@pytest.mark.parametrize("rules", ['root ::= "é" ("a" | "b")\n', 'start: "é" ("a" | "b")\n'])
def test_rules(folder: Path, tmp_path: Path, capsys: Capture, rules: str) -> None:
    file = tmp_path / "rules"
    file.write_text(rules, encoding="utf-8")
    assert written(folder, capsys, "--grammar", str(file)) in ("éa", "éb")


def test_a_chat_is_constrained_too(tmp_path: Path, capsys: Capture) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8"
    )
    assert written(folder, capsys, "--chat", "--regex", "yes|no", "-n", "9") in ("yes", "no")


def test_mistakes_are_told_before_a_model_is_looked_for(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{", encoding="utf-8")
    Path("latin.lark").write_bytes(b'start: "\xe9"')
    for options, words in (
        (["--regex", "["], "unclosed"),
        (["--json-schema", "bad.json"], "not JSON"),
        (["--grammar", "latin.lark"], "not UTF-8"),
        (["--grammar", "none.lark"], "none.lark"),
        (["--regex", "a", "--grammar", "latin.lark"], "only one of"),
    ):
        assert main(["generate", "-m", "no-such-model", "-p", "x", *options]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1

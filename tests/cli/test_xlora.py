"""`--xlora`, `--xlora-freeze` and `--show-scalings`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from starquill.cli.app import main
from starquill.engine.engine import Engine
from starquill.loading import load
from starquill.types import SamplingParams
from tests import tiny
from tests.adapters import making, making_xlora
from tests.cli.test_serve import Served

Capture = pytest.CaptureFixture[str]
COUNT = 8
PROMPT = "def f(x):"
NAMES = ["adapter_8", "adapter_9", "adapter_10"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and an X-LoRA for it."""
    torch.set_num_threads(1)
    top = tmp_path_factory.mktemp("cli")
    experts = making_xlora.adapters(top / "experts")
    model = making_xlora.reference(experts, layerwise_scalings=True)
    xlora = making_xlora.write(top / "xlora", model, experts, "xlora")
    return tiny.write_checkpoint(top / "model", tiny.config(max_position_embeddings=512)), xlora


def options(folders: tuple[Path, Path], *more: str) -> list[str]:
    model, xlora = folders
    fixed = ["-m", str(model), "--xlora", str(xlora), "-n", str(COUNT), "--logit-bias", "0=-100"]
    return [*fixed, *more]


def expected(folders: tuple[Path, Path], **more: Any) -> tuple[str, list[list[float]]]:
    """The text, and the mean scalings that wrote each token."""
    engine = Engine(load(folders[0], xlora=folders[1], **more))
    generation = engine.generate(
        PROMPT, SamplingParams(max_tokens=COUNT, logit_bias={0: -100.0}), heal=False
    )
    deltas = list(generation)
    assert generation.scalings is not None
    means = generation.scalings.mean(1)[-len(deltas) :]
    return "".join(delta.text for delta in deltas), means.tolist()


@pytest.mark.parametrize("freeze", [None, 2])
def test_scalings_are_reported(
    folders: tuple[Path, Path], capsys: Capture, freeze: int | None
) -> None:
    more = [] if freeze is None else ["--xlora-freeze", str(freeze)]
    more += ["-p", PROMPT, "--no-heal", "--json", "--show-scalings"]
    assert main(["generate", *options(folders, *more)]) == 0
    out, err = capsys.readouterr()
    text, means = expected(folders, xlora_freeze=freeze)
    report = json.loads(out)
    assert report["text"] == text
    found = [token["adapters"] for token in report["tokens"]]
    assert [list(one) for one in found] == [NAMES] * COUNT
    for one, mean in zip(found, means, strict=True):
        assert list(one.values()) == pytest.approx(mean, abs=1e-4)
    lines = err.splitlines()
    assert len(lines) == COUNT
    for line, mean in zip(lines, means, strict=True):
        assert re.search(rf" [·▁▂▃▄▅▆▇█]{{3}} adapter_\d+ {max(mean):.2f}$", line)
        assert f" {NAMES[mean.index(max(mean))]} " in line


def test_healing_shifts_nothing(folders: tuple[Path, Path], capsys: Capture) -> None:
    """A token that only spells the prompt's end again has no line, the others keep theirs."""
    prompt = "def f(x): de"
    more = ["-p", prompt, "--json", "--show-scalings"]
    assert main(["generate", *options(folders, *more)]) == 0
    out, err = capsys.readouterr()
    tokens = json.loads(out)["tokens"]
    model = load(folders[0], xlora=folders[1])
    params = SamplingParams(max_tokens=COUNT, logit_bias={0: -100.0})
    generation = Engine(model).generate(prompt, params)
    deltas = list(generation)
    respelled = sum(delta.is_prompt for delta in deltas)
    assert respelled > 0
    assert generation.scalings is not None
    means = generation.scalings.mean(1)[-len(deltas) :][respelled:]
    assert len(tokens) == len(means) == len(err.splitlines())
    for token, mean in zip(tokens, means.tolist(), strict=True):
        assert list(token["adapters"].values()) == pytest.approx(mean, abs=1e-4)


def test_fill_has_it_too(folders: tuple[Path, Path], capsys: Capture) -> None:
    more = ["-p", "def f(<fill>):", "--show-scalings"]
    assert main(["fill", *options(folders, *more)]) == 0
    assert "adapter_" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["generate", "--show-scalings", "-p", "a"], "need --xlora"),
        (["fill", "--xlora-freeze", "3", "-p", "<fill>"], "need --xlora"),
        (["generate", "--xlora", "x", "--xlora-freeze", "-1", "-p", "a"], "expected 0 or more"),
        (["serve", "--xlora-freeze", "3"], "need --xlora"),
        (["generate", "--xlora", "nowhere", "-p", "a"], "no X-LoRA at nowhere"),
    ],
)
def test_mistakes(arguments: list[str], fact: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    assert fact in capsys.readouterr().err


def test_a_server_answers_with_it(folders: tuple[Path, Path]) -> None:
    model, xlora = folders
    served = Served(["--model", str(model), "--xlora", str(xlora)])
    try:
        body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "logit_bias": {"0": -100}}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
    finally:
        served.end()
    assert answer["choices"][0]["text"] == expected_healed(folders)


def expected_healed(folders: tuple[Path, Path]) -> str:
    params = SamplingParams(max_tokens=COUNT, logit_bias={0: -100.0})
    return Engine(load(folders[0], xlora=folders[1])).complete(PROMPT, params)


def test_a_hub_id_is_downloaded(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """What a hub would send for the patterns that it was asked for, adapters' folders included."""
    model, xlora = folders
    served = shutil.copytree(xlora, tmp_path / "served")
    (served / "adapter_8" / "optimizer.pt").write_bytes(b"not asked for")
    sent: list[str] = []

    def snapshot_download(repository: str, **asked: Any) -> str:
        assert repository == "owner/name"
        names = [str(p.relative_to(served)) for p in served.rglob("*") if p.is_file()]
        patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
        for name in filter_repo_objects(names, **patterns):
            (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(served / name, tmp_path / "cache" / name)
            sent.append(name)
        return str(tmp_path / "cache")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    text, _ = expected(folders)
    remote = options((model, Path("owner/name")), "-p", PROMPT, "--no-heal")
    assert main(["generate", *remote]) == 0
    assert text in capsys.readouterr().out
    adapters = [f"{name}/{file}" for name in NAMES for file in (making.CONFIG, making.FILE)]
    assert sorted(sent) == sorted([*adapters, "xlora_config.json", "xlora_classifier.safetensors"])

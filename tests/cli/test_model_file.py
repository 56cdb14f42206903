"""`serve --ray --models FILE`: what the file says, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from starquill.cli.model_file import read_models
from starquill.cli.options import ModelOptions, QuantizeOptions, XLoraOptions
from starquill.cli.ray_options import RayOptions
from starquill.cli.serve import ListenOptions, LoadingOptions, LoraOptions, WorkOptions
from starquill.errors import BadRequestError
from tests.cli.test_errors import error_line
from tests.clusters import NO_RAY

Capture = pytest.CaptureFixture[str]
FILE = """
coder:
  model: some/model
  quant: 4
  stages: 0-3,4-7
  lora: [sql=/adapters/sql]
  replicas: 2
small:
  model: default
  slots: 2
  replica-cpus: 1
  lora: one=/adapters/one
  prefix-cache: false
  topology: layers.yml
  fim-order: spm
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "models.yml"
    path.write_text(text, encoding="utf-8")
    return path


def test_values_become_those_of_the_options(tmp_path: Path) -> None:
    assert read_models(write(tmp_path, FILE)) == {
        "coder": {
            "model": "some/model",
            "quant": "4",
            "stages": "0-3,4-7",
            "lora": ["sql=/adapters/sql"],
            "replicas": 2,
        },
        "small": {
            "model": "default",
            "slots": 2,
            "replica_cpus": 1.0,
            "lora": ["one=/adapters/one"],
            "prefix_cache": False,
            "topology": Path("layers.yml"),
            "fim_order": "spm",
        },
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ["expected models by name"]),
        ("[1]", ["expected models by name"]),
        ("a: [", ["not valid YAML"]),
        ("a: default", ["a is 'default' (expected options, model among them)"]),
        ("a: {quant: 4}", ["model among them"]),
        ("a: {model: m, slot: 2}\nb: {model: m, port: 80}", ["a has 'slot'", "b has 'port'"]),
        ("a: {model: m, slots: two}", ["a: slots is 'two' (expected a whole number)"]),
        ("a: {model: m, slots: true}", ["slots is True"]),
        ("a: {model: m, exact: 1}", ["exact is 1 (expected true or false)"]),
        ("a: {model: m, fim-order: abc}", ["expected psm or spm"]),
        ("a: {model: m, lora: {x: y}}", ["expected a list of texts"]),
        ("a: {model: m, ray-address: x, lora-root: y}", ["'ray-address'", "'lora-root'"]),
    ],
)
def test_mistakes_are_told_all_at_once(tmp_path: Path, text: str, told: list[str]) -> None:
    with pytest.raises(BadRequestError) as error:
        read_models(write(tmp_path, text))
    for part in told:
        assert part in str(error.value)


def asked(**options: Any) -> Any:
    pytest.importorskip("ray", reason=NO_RAY)
    from starquill.cli.serve_ray import Serving

    loading = LoadingOptions(ModelOptions(), QuantizeOptions(), XLoraOptions(), LoraOptions())
    ray = RayOptions(ray=True, **options)
    return Serving(ListenOptions(api_key="secret"), WorkOptions(slots=3), loading, ray, None)


def test_each_model_has_its_own_options_and_shares_the_rest(tmp_path: Path) -> None:
    given = asked(replica_cpus=2)
    from starquill.cli.serve_ray import servings

    found = servings(write(tmp_path, FILE), given, None)
    coder, small = (one.service() for one in found.values())
    assert list(found) == ["coder", "small"]
    assert (coder.cluster.least, coder.cluster.stages, coder.cluster.cpus) == (2, 2, 2.0)
    assert (small.cluster.least, small.cluster.stages, small.cluster.cpus) == (1, 1, 1.0)
    assert (coder.engine.slots, small.engine.slots) == (3, 2)
    assert found["coder"].loading.quantize.quant == "4"
    assert found["small"].loading.quantize.quant is None
    assert found["coder"].listen.name == ["coder"]
    assert found["small"].adapters == ("one",)
    # The key stays at the front.
    assert coder.make.args[0].listen.api_key is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: {model: m, slots: 0}\nb: {model: m, replicas: 0}", ["a: --slots is 0", "b: --repl"]),
        ("a: {model: m, lora: [b=x]}\nb: {model: m}", ["b is the name of 2"]),
        ("a: {model: m, stages: x}", ["a: --stages is 'x'"]),
        ("a: {model: m, stages: 2, replica-gpus: 1}", ["--replica-gpus"]),
    ],
)
def test_options_that_make_no_sense_are_told_with_their_model(
    tmp_path: Path, text: str, told: list[str]
) -> None:
    given = asked()
    from starquill.cli.serve_ray import servings

    with pytest.raises(BadRequestError) as error:
        servings(write(tmp_path, text), given, None)
    for part in told:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--stages", "2"], "--stages and --models need --ray"),
        (["--models", "x.yml"], "--stages and --models need --ray"),
        (["default", "--ray", "--models", "x.yml"], "name none beside it"),
        (["--ray", "--models", "x.yml", "--name", "y"], "--name and --allow-lora-updates"),
        (["--ray", "--stages", "two"], "--stages is 'two'"),
        (["--ray", "--stages", "2", "--replica-cpus", "0"], "--replica-cpus is 0"),
        (
            ["--ray", "--replicas", "2", "--allow-lora-updates", "--lora-root", "."],
            "single replica",
        ),
    ],
)
def test_the_command_line_refuses(arguments: list[str], told: str, capsys: Capture) -> None:
    if "--ray" in arguments:
        pytest.importorskip("ray", reason=NO_RAY)
    assert told in error_line(capsys, "serve", "--port", "0", *arguments)

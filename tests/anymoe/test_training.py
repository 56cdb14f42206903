"""Training gates: that they learn, the same by seed, on after an interruption, or say why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from starquill.anymoe import AnyMoeConfig, TrainProgress, TrainReport, join, read_layers, train
from starquill.anymoe.course import Lessons
from starquill.anymoe.gates import GATE_FILE, Gates, read_gates, write_gates
from starquill.anymoe.rows import read_rows, split_rows
from starquill.anymoe.states import States
from starquill.cli.app import main
from starquill.engine.engine import Engine
from starquill.errors import BadRequestError, CheckpointError, StarquillError
from starquill.loading import load
from starquill.types import SamplingParams
from tests import tiny
from tests.anymoe import making

FAST = AnyMoeConfig(epochs=12, learning_rate=2e-2, held_out=0.34)
NAMES = ("base", "one", "two")


class Given:
    """A base, a whole expert, a LoRA, and rows for the three."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = making.checkpoint(folder / "base", 0)
        self.experts: dict[str, Path] = {
            "one": making.checkpoint(folder / "one", 1),
            "two": making.lora(folder / "two", 2),
        }
        self.data = making.rows(folder / "rows.json")

    def train(self, out: str = "out", config: AnyMoeConfig = FAST, **more: Any) -> TrainReport:
        return train(self.base, self.experts, self.data, self.folder / out, config, **more)

    def gates(self, out: str = "out") -> dict[str, torch.Tensor]:
        return load_file(self.folder / out / GATE_FILE)


@pytest.fixture
def given(tmp_path: Path) -> Given:
    return Given(tmp_path)


@pytest.mark.parametrize("gate", ["token", "mean"])
def test_gates_learn_whose_a_row_is(given: Given, gate: Any) -> None:
    stages = []
    report = given.train(config=replace(FAST, gate=gate), on_progress=stages.append)
    assert report.held_out == 6
    assert report.accuracy > 0.95
    assert report.confusion == ((2, 0, 0), (0, 2, 0), (0, 0, 2))
    assert sum(report.shares) == pytest.approx(1)
    assert {p.stage for p in stages} == {"reading", "training", "writing"}
    names = {p.name for p in report.out.iterdir()}
    assert {"anymoe-loss.csv", "anymoe-loss.png", "anymoe-report.json", GATE_FILE} <= names
    assert json.loads((report.out / "anymoe-report.json").read_text())["experts"] == list(NAMES)
    lines = (report.out / "anymoe-loss.csv").read_text().splitlines()
    assert len(lines) == report.epochs + 1
    loaded = load(report.out)
    deltas = list(Engine(loaded).generate("import os", SamplingParams(max_tokens=4)))
    assert deltas[-1].finish_reason in ("length", "stop")
    assert not list(given.folder.glob(".*"))


def test_a_layer_that_is_not_chosen_stays_dense(given: Given) -> None:
    report = given.train(config=replace(FAST, layers=(0, 2)))
    raw = json.loads((report.out / "config.json").read_text())
    assert raw["mlp_only_layers"] == [1]
    assert not hasattr(load(report.out).model.model.layers[1].mlp, "gate")


def test_lm_finds_labels_by_itself(given: Given) -> None:
    """Rows without labels; each expert is best at what its own model writes."""
    texts = []
    models = (given.base, given.experts["one"])
    for model in models:
        engine = Engine(load(model))
        for seed in range(8):
            params = SamplingParams(max_tokens=40, temperature=0.5, seed=seed)
            texts.append("".join(d.text for d in engine.generate("d", params)))
    given.data.write_text(json.dumps({"rows": [{"prompt": f"d{t}"} for t in texts]}))
    given.experts.pop("two")
    report = given.train(config=replace(FAST, objective="lm"))
    assert sum(map(sum, report.confusion)) == report.held_out > 0
    assert report.accuracy > 0.8
    first, last = read_history(report)[0], read_history(report)[-1]
    assert float(last["loss"]) < float(first["loss"])


def read_history(report: TrainReport) -> list[dict[str, str]]:
    import csv

    with (report.out / "anymoe-loss.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("objective", ["label", "lm"])
@pytest.mark.parametrize("pooled", [False, True])
def test_the_slope_is_autograds(objective: str, pooled: bool) -> None:
    """And the loss torch's cross-entropy, each token weighted."""
    generator = torch.Generator().manual_seed(0)
    lengths, labels = (5, 2, 9), [2, 0, 1]
    hidden = torch.randn(4, sum(lengths), 8, generator=generator).half().numpy()
    costs = [torch.rand(n, 3, generator=generator) for n in lengths]
    lessons = Lessons(States(hidden, lengths), labels, costs if objective == "lm" else None, 3)
    wanted = lessons.wanted([2, 0], pooled=pooled)
    inputs = lessons.inputs([2, 0], pooled=pooled)
    weight = torch.randn(4, 3, 8, generator=generator, requires_grad=True)
    scores = Gates((0, 1, 2, 3), weight, torch.zeros(4, 3)).scores(inputs)
    each = [
        torch.nn.functional.cross_entropy(row.T, wanted.experts, reduction="none") for row in scores
    ]
    loss = (torch.stack(each) * wanted.weights).sum()
    assert wanted.loss(scores).item() == pytest.approx(loss.item(), rel=1e-5)
    assert float(wanted.weights.sum()) == pytest.approx(1)
    (expected,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(wanted.slope(scores.detach()) @ inputs, expected)


def test_same_seed_same_gates(given: Given) -> None:
    for out, seed in (("a", 3), ("b", 3), ("c", 4)):
        given.train(out, replace(FAST, seed=seed))
    a, b, c = (given.gates(out) for out in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


def test_goes_on_after_an_interruption(given: Given) -> None:
    whole = given.train("whole")

    def interrupt(progress: TrainProgress) -> None:
        if progress.stage == "training" and progress.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        given.train("out", on_progress=interrupt)
    assert not (given.folder / "out").exists()
    seen: list[TrainProgress] = []
    report = given.train("out", on_progress=seen.append)
    assert next(p.done for p in seen if p.stage == "training") == 5
    assert not [p for p in seen if p.stage == "reading"]
    assert report.epochs == whole.epochs
    one, other = given.gates("whole"), given.gates("out")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (given.folder / "out" / "anymoe-loss.csv").read_text() == (
        given.folder / "whole" / "anymoe-loss.csv"
    ).read_text()


def test_another_run_does_not_go_on_with_it(given: Given) -> None:
    def interrupt(progress: TrainProgress) -> None:
        if progress.stage == "training":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        given.train(on_progress=interrupt)
    seen: list[TrainProgress] = []
    given.train(config=replace(FAST, seed=9), on_progress=seen.append)
    assert [p for p in seen if p.stage == "reading"]


def test_stops_early(given: Given) -> None:
    report = given.train(config=replace(FAST, epochs=300, learning_rate=1.0))
    assert report.epochs == report.best_epoch + 10 or report.epochs == 300
    assert report.epochs < 300


def test_nothing_held_out(given: Given) -> None:
    """No early stop, no accuracy on the way, and a warning that the report is of rows it knows."""
    report = given.train(config=replace(FAST, held_out=0.0))
    assert (report.epochs, report.held_out, report.rows) == (12, 0, 18)
    assert report.accuracy > 0.95
    assert "no rows were held out" in report.warnings[0]
    assert {row["accuracy"] for row in read_history(report)} == {""}


def test_gates_file_is_mistralrs(given: Given, tmp_path: Path) -> None:
    report = given.train(config=replace(FAST, layers=(0, 2)))
    assert set(given.gates()) == {
        f"moe_gate.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")
    }
    read = read_gates(report.out / GATE_FILE, (0, 2), 3, 64)
    write_gates(read, tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(t, again[n]) for n, t in given.gates().items())
    with pytest.raises(CheckpointError, match="has gates for layers 0, 2 "):
        read_gates(report.out / GATE_FILE, (0, 1, 2), 3, 64)
    with pytest.raises(CheckpointError, match=r"is \[3, 64\] \(expected \[2, 64\]"):
        read_gates(report.out / GATE_FILE, (0, 2), 2, 64)


def test_joined_from_gates_or_a_reference(given: Given) -> None:
    whole = given.train("whole", replace(FAST, top_k=2))
    ids = tiny.random_ids(12)
    expected = tiny.our_logits(load(whole.out), ids)
    reference = given.train("reference", replace(FAST, top_k=2, bundle=False)).out
    assert not list(reference.glob("model*.safetensors"))
    folder = given.folder
    config = AnyMoeConfig(top_k=2)
    made = [
        join(reference, folder / "a"),
        join(whole.out / GATE_FILE, folder / "b", given.base, given.experts, config),
    ]
    for path in made:
        assert torch.equal(tiny.our_logits(load(path), ids), expected)


def rows_of(given: Given, *rows: Any) -> None:
    given.data.write_text(json.dumps({"rows": list(rows)}))


def damage(given: Given, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = given.experts["one"] / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


C_FC = "model.layers.1.mlp.c_fc.weight"
FAULTS: dict[str, tuple[Callable[[Given], Any], str]] = {
    "no such expert": (
        lambda g: rows_of(g, {"prompt": "a b", "expert": 3}),
        "row 0: expert is 3 .expected 0 or 'base', 1 or 'one', 2 or 'two'",
    ),
    "no such name": (
        lambda g: rows_of(g, {"prompt": "a b", "expert": "tow"}),
        "expert is 'tow' .expected 0 or 'base'",
    ),
    "an empty class": (
        lambda g: rows_of(g, {"prompt": "a b", "expert": 0}, {"prompt": "c d", "expert": "one"}),
        "has no rows for two",
    ),
    "no prompt": (lambda g: rows_of(g, {"expert": 0}), "row 0 has no prompt"),
    "no rows": (lambda g: g.data.write_text("{}"), "has no list of rows"),
    "no JSON": (lambda g: g.data.write_text("{"), "not valid JSON"),
    "no data": (lambda g: g.data.unlink(), "is not there"),
    "a single token": (
        lambda g: rows_of(g, *({"prompt": "d", "expert": e} for e in range(3))),
        "is a single token",
    ),
    "another width": (
        lambda g: g.experts.update(one=making.checkpoint(g.folder / "w", 1, intermediate_size=128)),
        r"expert one: .* is not of the base's shape: intermediate_size 128 .expected 256",
    ),
    "other depth": (
        lambda g: g.experts.update(one=tiny.write_checkpoint(g.folder / "d")),
        "num_hidden_layers 2 .expected 3",
    ),
    "another architecture": (lambda g: g.experts.update(one=mixtral(g)), "is a mixtral model"),
    "a tensor is missing": (lambda g: damage(g, lambda t: t.pop(C_FC)), f"{C_FC} is missing"),
    "a tensor of another shape": (
        lambda g: damage(g, lambda t: t.update({C_FC: t[C_FC][:5].clone()})),
        r"is \[5, 64\] .expected \[256, 64\]",
    ),
    "not finite": (
        lambda g: damage(g, lambda t: t[C_FC].view(-1)[3:4].fill_(float("nan"))),
        f"expert one: {C_FC} has values that are not finite",
    ),
    "hidden states overflow": (
        lambda g: damage(g, lambda t: t[C_FC].mul_(1e38)),
        "hidden states of layer 2 are not finite for row .* with expert one",
    ),
    "no such model": (lambda g: g.experts.update(one=g.folder / "none"), "no model at"),
    "a bad name": (lambda g: g.experts.update(base=g.base), "an expert is called 'base'"),
    "no experts": (lambda g: g.experts.clear(), "needs an expert besides the base"),
}


def mixtral(given: Given) -> Path:
    from tests import moe

    raw = moe.config("mixtral")
    return moe.write(given.folder / "mixtral", raw, moe.reference(raw))


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_one_line_and_leave_nothing(given: Given, name: str) -> None:
    change, message = FAULTS[name]
    change(given)
    with pytest.raises(StarquillError, match=message) as caught:
        given.train()
    assert "\n" not in str(caught.value)
    assert not (given.folder / "out").exists()
    assert not list(given.folder.glob(".*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (0, 3)}, "layers has 3, and the model has 0 to 2"),
        ({"layers": ()}, "layers is empty"),
        ({"top_k": 4}, "top_k is 4 .expected 1 to 3"),
        ({"epochs": 0}, "epochs is 0"),
        ({"gate": "row"}, "gate is 'row' .expected mean or token"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"lora_experts": "delta"}, "expert one is a whole checkpoint"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(given: Given, change: dict[str, Any], message: str) -> None:
    with pytest.raises(StarquillError, match=message):
        given.train(config=replace(FAST, **change))
    assert not (given.folder / "out").exists()


def test_an_existing_folder_is_refused_before_anything_is_read(given: Given) -> None:
    (given.folder / "out").mkdir()
    (given.folder / "out" / "mine").write_text("")
    given.experts["one"] = given.folder / "none"
    with pytest.raises(BadRequestError, match="out exists already; name a new folder"):
        given.train()


def test_layers_as_text() -> None:
    assert read_layers("0-2, 7,5-5") == (0, 1, 2, 5, 7)
    for text in ("", "2-1", "a", "1,,2", "-3"):
        with pytest.raises(BadRequestError, match="as 0-15,20"):
            read_layers(text)


def test_folders_of_code_and_lines(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / "code" / name / "deep").mkdir(parents=True)
        (tmp_path / "code" / name / "deep" / "a.txt").write_text(f"{name}\n" * 2000)
        (tmp_path / "code" / name / "b.txt").write_text(name)
        (tmp_path / "code" / name / ".hidden").write_text(name)
    rows = read_rows(tmp_path / "code", NAMES, labelled=True)
    assert {(row.expert, row.prompt[:3]) for row in rows} == {
        (0, "bas"),
        (1, "one"),
        (2, "two"),
    } | {(e, row.prompt[:3]) for e in range(3) for row in rows if row.expert == e}
    assert sum(row.group.endswith("a.txt") and row.expert == 1 for row in rows) == 4
    split = split_rows(rows, 0.5, 0)
    groups = [{rows[n].group for n in part} for part in (split.training, split.held_out)]
    assert not groups[0] & groups[1]
    assert len(groups[1]) == 3
    (tmp_path / "code" / "three").mkdir()
    with pytest.raises(BadRequestError, match="has folders for three, and the experts are base"):
        read_rows(tmp_path / "code", NAMES, labelled=True)
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"prompt": "a", "expert": "base"}\n\n{"prompt": "b", "expert": 1}\n')
    assert [row.expert for row in read_rows(lines, NAMES[:2], labelled=True)] == [0, 1]
    lines.write_text('{"prompt": "a", "expert": 0}\n{')
    with pytest.raises(BadRequestError, match="line 2 is not valid JSON"):
        read_rows(lines, NAMES[:2], labelled=True)


def test_command_line(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    experts = [f"--expert={name}={path}" for name, path in given.experts.items()]
    fixed = ["anymoe", "train", f"--base={given.base}", *experts, f"--data={given.data}"]
    out = given.folder / "out"
    assert main([*fixed, f"--out={out}", "--layers=0-1", "--epochs=3", "--no-bundle"]) == 0
    printed = capsys.readouterr().out
    assert "3 experts in 2 layers, 3 epochs" in printed
    assert main(["anymoe", "join", f"--gates={out}", f"--out={given.folder / 'made'}"]) == 0
    assert (
        main(["generate", f"--model={given.folder / 'made'}", "--max-tokens=2", "--prompt=a"]) == 0
    )
    capsys.readouterr()
    assert main([*fixed, f"--out={out}"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*fixed[:-2], f"--data={given.data}", "--expert=x", f"--out={out}2"]) == 2
    assert "--expert is 'x' (expected NAME=PATH)" in capsys.readouterr().err


def test_attention_adapters_by_request_act_on_a_mixture(given: Given) -> None:
    report = given.train(config=replace(FAST, epochs=2))
    loaded = load(report.out)
    from tests.adapters.making import logits

    loaded.adapters.load("q", making.only("q_proj", given.folder / "attention", 5))
    assert not torch.allclose(logits(loaded), logits(loaded, loaded.adapters, {"q": 1.0}))


def test_a_lora_that_does_more_than_mlps_is_told(
    given: Given, caplog: pytest.LogCaptureFixture
) -> None:
    given.experts["two"] = making.lora(given.folder / "more", 2, extra=True)
    report = given.train(config=replace(FAST, epochs=1))
    assert report.warnings == (
        "expert two: of its LoRA only MLPs count; 3 other modules are left out",
    )
    assert "3 other modules" in caplog.text

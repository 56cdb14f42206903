"""What `bench` measures: which steps are run in a round, and the figures made of their time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from starquill.engine import bench
from starquill.engine.bench import BenchPlan, Case, Measurement, measure, subject, weight_bytes
from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from starquill.errors import BadRequestError
from starquill.kernels.native import native
from starquill.loading import load
from starquill.nn.experts import ExpertLinear
from starquill.nn.linear import Linear
from starquill.quantizing import QuantOptions
from tests import moe, tiny

CONTEXT = 64


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny.write_checkpoint(tmp_path_factory.mktemp("model")))


class Recorder(Runner):
    """Writes down what it is asked to compute, and how long its sequences were before."""

    calls: list[tuple[Any, ...]]

    def prefill(self, place: Any, ids: Any, mix: Any = None) -> torch.Tensor:
        self.calls.append(("prefill", place.table[0], len(ids), place.length, place.span))
        return super().prefill(place, ids, mix)

    def decode(self, places: Any, ids: Any, mix: Any = None) -> torch.Tensor:
        assert all(len(new) == 1 for new in ids)
        rows = [(place.table[0], place.length, place.span) for place in places]
        self.calls.append(("decode", rows))
        return super().decode(places, ids, mix)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    Recorder.calls = []
    monkeypatch.setattr(bench, "Runner", Recorder)
    return Recorder.calls


def test_every_prompt_goes_into_an_empty_cache(loaded: LoadedModel, calls: list[Any]) -> None:
    found = measure(loaded, Case("prefill", 20), rounds=3)
    assert calls == [("prefill", 1, 20, 0, 20)] * 4  # one to warm up
    assert len(found.seconds) == 3


@pytest.mark.parametrize("depth", [0, 5, 30])  # the window is 8
@pytest.mark.parametrize("batch", [1, 3])
def test_decoding_begins_at_the_same_depth_in_every_round(
    loaded: LoadedModel, calls: list[Any], depth: int, batch: int
) -> None:
    found = measure(loaded, Case("decode", 4, depth, batch), rounds=2)
    blocks, span = range(1, batch + 1), depth + 4
    filled = [("prefill", block, depth, 0, span) for block in blocks] if depth else []
    steps = [("decode", [(block, depth + i, span) for block in blocks]) for i in range(4)]
    assert calls == [*filled, *steps, *steps, *steps]
    assert len(found.seconds) == 2


@pytest.mark.parametrize("case", [Case("prefill", 6), Case("decode", 4, 3, 2)])
def test_only_the_rounds_are_on_the_clock(loaded: LoadedModel, case: Case) -> None:
    """The first round, at a clock of its own speed, is not among them."""
    times = itertools.accumulate([0, 100, 7, 1, 7, 2, 7, 4], initial=0)
    next(times)
    found = measure(loaded, case, rounds=3, clock=lambda: next(times))
    assert found.seconds == (1, 2, 4)


def test_figures() -> None:
    decode = Measurement(Case("decode", 10, 5, 4), (2.0, 0.5, 1.0), weight_bytes=300)
    assert decode.rate == 40  # 20, 80 and 40 tokens a second
    assert decode.deviation == pytest.approx(30.55, abs=0.01)
    assert decode.milliseconds == 100  # four sequences get theirs together
    assert decode.bytes_rate == 3000
    prefill = Measurement(Case("prefill", 10), (2.0,), weight_bytes=300)
    assert (prefill.rate, prefill.deviation, prefill.milliseconds) == (5, 0, 200)
    assert prefill.bytes_rate is None


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_are_those_multiplied_with(tmp_path: Path, tied: bool) -> None:
    """An embedding that is the head counts once; one that is only looked up does not."""
    raw = tiny.config(tie_word_embeddings=tied)
    state = tiny.weights(raw, head=not tied)
    matrices = {n: t for n, t in state.items() if t.dim() == 2}
    if not tied:
        del matrices["model.embed_tokens.weight"]
    model = load(tiny.write_checkpoint(tmp_path, raw, state))
    assert weight_bytes(model) == sum(4 * tensor.numel() for tensor in matrices.values())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "starcoder2_moe"])
def test_weight_bytes_of_experts_are_of_those_that_work(tmp_path: Path, family: str) -> None:
    """One token goes to as many as the config says; of more tokens some share an expert."""
    raw = moe.config(family)
    folder = moe.write(tmp_path, raw, moe.reference(raw).to(torch.bfloat16))
    loaded = load(folder, quant=QuantOptions("4", organization="moqe"))
    modules = dict(loaded.model.named_modules())
    stacks = [m.weight.nbytes for m in modules.values() if isinstance(m, ExpertLinear)]
    others = {id(m.weight): m.weight.nbytes for m in modules.values() if isinstance(m, Linear)}
    top, count = loaded.config.num_experts_per_tok, loaded.config.num_experts  # type: ignore[attr-defined]
    assert weight_bytes(loaded) == sum(others.values()) + round(sum(stacks) * top / count)
    assert weight_bytes(loaded) < weight_bytes(loaded, 2) < sum(others.values()) + sum(stacks)
    assert weight_bytes(loaded, 999) == sum(others.values()) + sum(stacks)
    assert measure(loaded, Case("decode", 1, 0, 2), 1).weight_bytes == weight_bytes(loaded, 2)
    kinds = subject(loaded).schemes
    assert {k for k in kinds if k.startswith("experts.")} == {
        ".".join(n.split(".")[-2:]) for n, m in modules.items() if isinstance(m, ExpertLinear)
    }


def test_subject_says_what_was_measured(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    model = load(folder, quant="mixed-2-6")
    about = subject(model)
    assert about.model == model.name
    assert about.schemes["q_proj"] == {"q2-g32": 2}
    assert about.schemes["c_proj"] == {"q2-g32": 1, "q6-g64": 1}
    assert about.schemes["lm_head"] == about.schemes["embed_tokens"]
    assert sum(sum(counts.values()) for counts in about.schemes.values()) == 2 * 6 + 2
    assert about.dtype == "float32"
    assert about.threads == torch.get_num_threads()
    assert about.instruction_set == (native.isa() if native else None)
    assert about.versions["torch"] == torch.__version__
    assert about.weight_bytes == weight_bytes(model)


def test_cases_in_order() -> None:
    plan = BenchPlan((3, 0, 5), (0, 2), (1, 4), tokens=7)
    assert plan.cases() == [
        Case("prefill", 3),
        Case("prefill", 5),
        Case("decode", 7, 0, 1),
        Case("decode", 7, 0, 4),
        Case("decode", 7, 2, 1),
        Case("decode", 7, 2, 4),
    ]
    assert [case.kind for case in BenchPlan((3,), (9,), tokens=0).cases()] == ["prefill"]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (BenchPlan(rounds=0), "rounds is 0"),
        (BenchPlan(prompts=(4, -1)), "-1 "),
        (BenchPlan(depths=(-3,)), "-3 "),
        (BenchPlan(tokens=-2), "-2 "),
        (BenchPlan(batches=(1, 0)), "batch is 0 "),
        (BenchPlan(batches=(10**30,)), "expected 1 to 1024"),
        (BenchPlan((0,), tokens=0), "nothing to measure"),
    ],
)
def test_plans_that_make_no_sense(plan: BenchPlan, said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        plan.check()


def test_lengths_over_the_context_are_told_together() -> None:
    plan = BenchPlan((64, 65, 100), (0, 32, 33, 60), tokens=32)
    plan.check()
    with pytest.raises(BadRequestError) as caught:
        plan.check_context(CONTEXT)
    said = str(caught.value)
    assert "64 tokens" in said
    for part in ("a prompt of 65", "a prompt of 100", "32 more at depth 33", "at depth 60"):
        assert part in said
    assert "prompt of 64" not in said
    assert "at depth 32" not in said
    BenchPlan((64,), (32,), tokens=32).check_context(CONTEXT)
    BenchPlan((64,), (99,), tokens=0).check_context(CONTEXT)  # no decoding, so no depth


def test_the_longest_that_fits_is_measured(loaded: LoadedModel) -> None:
    for case in (Case("prefill", CONTEXT), Case("decode", 4, CONTEXT - 4, 2)):
        found = measure(loaded, case, rounds=1)
        assert found.rate > 0

"""Gates that choose once for a sequence: by the mean over its prompt, whatever else happens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from starquill.anymoe import AnyMoeConfig, join, train
from starquill.anymoe.experts import open_base
from starquill.anymoe.gates import GATE_FILE, Gates, write_gates
from starquill.anymoe.training import write
from starquill.cli.app import main
from starquill.engine.bench import Case, measure
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.pooling import pieces_of
from starquill.engine.scoring import score_texts
from starquill.errors import UnsupportedError
from starquill.loading import load
from starquill.nn.experts import PooledMlp, SparseMlp
from starquill.nn.route import Route
from starquill.placement.stages import StageOf, read_stages
from starquill.types import EngineOptions, GenerateRequest, SamplingParams
from tests import tiny
from tests.adapters import making_xlora
from tests.anymoe import making
from tests.engine.test_batching import arriving, outcome, requests

CONTEXT, WINDOW = 600, 150
LAYERS, MIXED = 3, (0, 2)
NO_END = {0: -100.0}
SHAPE = {"max_position_embeddings": CONTEXT, "sliding_window": WINDOW}


@cache
def gates(base: Path, experts: int) -> Gates:
    """Gates that choose differently by prompt: undecided at the mean over many tokens."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(len(MIXED), experts, 64, generator=generator) * 3
    raw = tiny.config(num_hidden_layers=LAYERS, **SHAPE)
    model = tiny.reference_model(raw, load_file(base / "model.safetensors"))
    seen: dict[int, Tensor] = {}
    for layer in MIXED:
        model.model.layers[layer].mlp.register_forward_pre_hook(
            lambda _, given, layer=layer: seen.update({layer: given[0][0].mean(0)})
        )
    with torch.inference_mode():
        model(torch.tensor([tiny.random_ids(500, seed=9)]))
    bias = [-weight[place] @ seen[layer].clone() for place, layer in enumerate(MIXED)]
    return Gates(MIXED, weight, torch.stack(bias))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base and two experts."""
    torch.set_num_threads(1)
    top = tmp_path_factory.mktemp("parts")
    return [making.checkpoint(top / str(seed), seed, **SHAPE) for seed in range(3)]


def written(out: Path, parts: Sequence[Path], top_k: int = 1, own: Gates | None = None) -> Path:
    experts = {str(number): path for number, path in enumerate(parts[1:], 1)}
    config = AnyMoeConfig(top_k=top_k, gate="mean")
    return write(open_base(parts[0]), experts, own or gates(parts[0], len(parts)), out, config)


@pytest.fixture(scope="module", params=[1, 2], ids=["top 1", "top 2"])
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, parts: list[Path]
) -> LoadedModel:
    return load(written(tmp_path_factory.mktemp("made") / "it", parts, request.param))


class ReferenceMlp(nn.Module):
    """transformers' MLPs, weighed by what the mean over the first `prompt` tokens scores."""

    prompt = 0

    def __init__(self, experts: Sequence[nn.Module], gate: tuple[Tensor, Tensor], top: int) -> None:
        super().__init__()
        self.experts, self.gate, self.top = nn.ModuleList(experts), gate, top
        self.chosen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.gate
        scores = (x[0, : self.prompt].mean(0) @ weight.T + bias).softmax(-1)
        best = scores.topk(self.top)
        self.chosen = best.indices.tolist()
        shares = best.values / best.values.sum()
        made = [s * self.experts[e](x) for s, e in zip(shares, self.chosen, strict=True)]
        return sum(made, torch.zeros(()))


@cache
def reference(parts: tuple[Path, ...], own: Gates, top: int) -> Any:
    raw = tiny.config(num_hidden_layers=LAYERS, **SHAPE)
    models = [tiny.reference_model(raw, load_file(p / "model.safetensors")) for p in parts]
    for place, layer in enumerate(MIXED):
        mlps = [model.model.layers[layer].mlp for model in models]
        gate = (own.weight[place], own.bias[place])
        models[0].model.layers[layer].mlp = ReferenceMlp(mlps, gate, top)
    return models[0]


@torch.no_grad()
def expected(
    parts: list[Path], top: int, ids: Sequence[int], prompt: int, own: Gates | None = None
) -> tuple[Tensor, list[list[int]]]:
    """Log probabilities `[T, V]`, and the experts of each layer that is a mixture."""
    model = reference(tuple(parts), own or gates(parts[0], len(parts)), top)
    ReferenceMlp.prompt = prompt
    found = model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)
    return found, [model.model.layers[layer].mlp.chosen for layer in MIXED]


def generated(
    engine: Engine, prompt: Sequence[int], tokens: int = 12
) -> tuple[list[int], Tensor, Tensor]:
    """Tokens, and what is told of each: log probabilities of the prompt's, and of these."""
    params = SamplingParams(max_tokens=tokens, logprobs=0, logit_bias=NO_END)
    made = GenerateRequest("r", tuple(prompt), params, prompt_logprobs=0)
    deltas = list(engine.generate(made))
    told = [one.chosen for one in deltas[0].prompt_logprobs or () if one is not None]
    own = [d.logprobs.chosen for d in deltas if d.logprobs is not None]
    return [d.token_id or 0 for d in deltas], torch.tensor(told), torch.tensor(own)


@pytest.mark.parametrize("length", [2, 40, 200])
@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_equals_transformers_mlps(
    loaded: LoadedModel, parts: list[Path], length: int, chunk: int
) -> None:
    """A prompt and what is written behind it, past the window too, however it is cut."""
    top = loaded.config.num_experts_per_tok  # type: ignore[attr-defined]
    prompt = tiny.random_ids(length, seed=length)
    engine = Engine(loaded, EngineOptions(prefill_chunk=chunk))
    new, told, own = generated(engine, prompt)
    ids = [*prompt, *new]
    rows, _ = expected(parts, top, ids, length)
    logp = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.cat([told, own]), logp, atol=1e-4, rtol=0)


def test_prompts_choose_differently(parts: list[Path]) -> None:
    """Else the tests here would say little."""
    chosen = set()
    for seed in range(12):
        ids = tiny.random_ids(30, seed=seed)
        chosen.add(str(expected(parts, 1, ids, 30)[1]))
    assert len(chosen) > 2


def test_written_tokens_do_not_change_the_choice(loaded: LoadedModel, parts: list[Path]) -> None:
    """The same text as a prompt chooses anew; what is told of it is then another."""
    top = loaded.config.num_experts_per_tok  # type: ignore[attr-defined]
    for seed in range(20):
        prompt = tiny.random_ids(5, seed=seed)
        new, _, _ = generated(Engine(loaded), prompt, 40)
        ids = [*prompt, *new]
        if expected(parts, top, ids, 5)[1] != expected(parts, top, ids, len(ids))[1]:
            break
    else:
        pytest.fail("no prompt whose text would choose otherwise")
    whole, _ = expected(parts, top, ids, len(ids))
    logp = whole[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    told = generated(Engine(loaded), ids, 1)[1]
    torch.testing.assert_close(told, logp, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("slots", [1, 3])
def test_company_and_the_cache_change_nothing(loaded: LoadedModel, seed: int, slots: int) -> None:
    """Not a bit, with prompts that begin alike, prompt lookup, and arrivals at any time."""
    starts = requests(8, seed)
    options = EngineOptions(slots=slots, prefill_chunk=64)
    alone = [outcome(Engine(loaded, options).generate(*start)) for start in starts]
    engine = Engine(loaded, options)
    assert arriving(engine, starts, seed) == alone
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.cached_tokens) == (0, 0, 0)
    assert stats.prompt_tokens >= sum(len(prompt) for prompt, _ in starts)


def test_lookup_changes_no_token(loaded: LoadedModel) -> None:
    prompt = tiny.random_ids(12, seed=3) * 6
    params = SamplingParams(max_tokens=60, logit_bias=NO_END)
    runs = []
    for lookup in (0, 16):
        engine = Engine(loaded, EngineOptions(lookup=lookup))
        runs.append([d.token_id for d in engine.generate(prompt, params)])
    assert engine.stats().proposed_tokens > 0
    assert runs[0] == runs[1]


def test_a_long_prompt_gives_others_their_turn(loaded: LoadedModel) -> None:
    """It takes as many steps as it has pieces, and one that writes meanwhile goes on."""
    engine = Engine(loaded, EngineOptions(prefill_chunk=50))
    params = SamplingParams(max_tokens=40, logit_bias=NO_END)
    first = engine.generate(tiny.random_ids(4), params)
    next(first)
    long = engine.generate(tiny.random_ids(400), params)
    before = engine.stats().steps
    next(long)
    assert engine.stats().steps - before >= 400 // 50
    assert first.stats.generated_tokens > 4
    long.cancel()
    first.cancel()
    assert engine.stats().cache_bytes_used == 0


def test_pieces_leave_no_single_token() -> None:
    assert [list(p) for p in pieces_of(7, 3)] == [[0, 1, 2], [3, 4, 5, 6]]
    assert [len(p) for p in pieces_of(8, 3)] == [3, 3, 2]
    assert [len(p) for p in pieces_of(1, 3)] == [1]


def test_scoring_takes_a_text_for_a_prompt(loaded: LoadedModel, parts: list[Path]) -> None:
    top = loaded.config.num_experts_per_tok  # type: ignore[attr-defined]
    text = "def f(x):\n    return x + 1\n" * 3
    ids = [0, *loaded.require_tokenizer().encode(text)]
    rows, _ = expected(parts, top, ids[:-1], len(ids) - 1)
    nats = -float(rows.gather(1, torch.tensor(ids[1:])[:, None]).sum())
    assert score_texts(loaded, [text]).nats == pytest.approx(nats, rel=1e-5)


@pytest.mark.parametrize("chosen", range(3))
def test_a_forced_expert_is_its_model(tmp_path: Path, parts: list[Path], chosen: int) -> None:
    made = load(written(tmp_path / "it", parts, own=making.forced(MIXED, chosen, 3)))
    states = [load_file(path / "model.safetensors") for path in parts]
    raw = tiny.config(num_hidden_layers=LAYERS, **SHAPE)
    spliced = making.spliced(states[0], states[chosen], MIXED)
    ids = tiny.random_ids(70)
    theirs = tiny.reference_logits(raw, spliced, ids)
    torch.testing.assert_close(tiny.our_logits(made, ids), theirs, atol=1e-5, rtol=1e-5)
    _, told, _ = generated(Engine(made, EngineOptions(prefill_chunk=16)), ids, 1)
    logp = theirs.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(told, logp, atol=1e-5, rtol=1e-5)


def test_layers_on_two_devices(loaded: LoadedModel) -> None:
    """Both really the CPU: what hops is told by `move`."""
    prompt = tiny.random_ids(90, seed=8)
    alone = generated(Engine(loaded), prompt)
    seen = []

    def move(tensor: Tensor, device: str) -> Tensor:
        seen.append(device)
        return tensor.clone()

    before = loaded.model.route
    loaded.model.route = Route(("cpu", "other", "cpu"), "cpu", "other", move=move)
    try:
        there = generated(Engine(loaded), prompt)
    finally:
        loaded.model.route = before
    assert "other" in seen
    assert there[0] == alone[0]
    assert torch.equal(there[2], alone[2])


def test_adapters_act_before_the_choice(
    tmp_path: Path, loaded: LoadedModel, parts: list[Path]
) -> None:
    """An adapter of attention, as if it were merged into the base that the experts share."""
    folder = making.only("q_proj", tmp_path / "q", 5)
    own = load_file(folder / "adapter_model.safetensors")
    loaded.adapters.load("q", folder)
    state = load_file(parts[0] / "model.safetensors")
    for name in [n for n in own if n.endswith("lora_A.weight")]:
        ours = name.removeprefix("base_model.model.").replace("lora_A.", "")
        state[ours] = state[ours] + 2 * own[name.replace("lora_A", "lora_B")] @ own[name]
    base = tiny.write_checkpoint(
        tmp_path / "merged", tiny.config(num_hidden_layers=LAYERS, **SHAPE), state
    )
    top = loaded.config.num_experts_per_tok  # type: ignore[attr-defined]
    changed = 0
    for seed in range(8):
        prompt = tiny.random_ids(60, seed=seed)
        params = SamplingParams(max_tokens=8, logprobs=0, logit_bias=NO_END)
        request = GenerateRequest("r", tuple(prompt), params, adapter="q", prompt_logprobs=0)
        told = next(iter(Engine(loaded).generate(request))).prompt_logprobs or ()
        own_gates = gates(parts[0], len(parts))
        rows, chosen = expected([base, *parts[1:]], top, prompt, 60, own_gates)
        logp = rows[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        ours = torch.tensor([one.chosen for one in told if one is not None])
        torch.testing.assert_close(ours, logp, atol=2e-4, rtol=0)
        changed += chosen != expected(parts, top, prompt, 60)[1]
    loaded.adapters.unload("q")
    assert changed, "the adapter changed no choice"


def test_rates_are_measured(loaded: LoadedModel) -> None:
    for case in (Case("prefill", 30), Case("decode", 3), Case("decode", 3, depth=10, batch=2)):
        assert measure(loaded, case, 1).rate > 0


def test_an_xlora_is_refused(tmp_path: Path, parts: list[Path]) -> None:
    """It would weigh adapters by a pass that knows no choice yet."""
    folders = making_xlora.adapters(tmp_path / "experts")
    model = making_xlora.reference(folders)
    xlora = making_xlora.write(tmp_path / "x", model, folders, "xlora")
    with pytest.raises(UnsupportedError, match=r"by the mean of a prompt .*; use one of them"):
        load(written(tmp_path / "it", parts), xlora=xlora)


def test_stages_are_refused(tmp_path: Path, parts: list[Path]) -> None:
    """A prompt goes on to the next layer only when all of it has passed the one before."""
    with pytest.raises(UnsupportedError, match="all layers must be in one process"):
        load(written(tmp_path / "it", parts), stage=StageOf(read_stages("2"), 0))


def test_folders_say_how_their_gates_choose(tmp_path: Path, parts: list[Path]) -> None:
    made = written(tmp_path / "it", parts)
    path = made / "config.json"
    raw = json.loads(path.read_text())
    assert raw["gate_type"] == "mean"
    kinds = [type(layer.mlp) for layer in load(made).model.model.layers]
    assert kinds.count(PooledMlp) == len(MIXED)
    # As older versions wrote it, whatever gates had learnt from.
    path.write_text(json.dumps({k: v for k, v in raw.items() if k != "gate_type"}))
    assert [type(layer.mlp) for layer in load(made).model.model.layers].count(SparseMlp) == 2
    path.write_text(json.dumps({**raw, "gate_type": "max"}))
    with pytest.raises(UnsupportedError, match=r"gate_type 'max' .implemented: token, mean"):
        load(made)


def test_trained_and_joined(tmp_path: Path, parts: list[Path]) -> None:
    """The choice in the engine is the one that training reports."""
    experts = {"one": parts[1], "two": parts[2]}
    data = making.rows(tmp_path / "rows.json")
    config = AnyMoeConfig(
        epochs=12, learning_rate=2e-2, held_out=0.34, gate="mean", layers=MIXED, bundle=False
    )
    report = train(parts[0], experts, data, tmp_path / "gates", config)
    assert report.accuracy > 0.95
    assert report.token_accuracy > 0.95, "a token's expert is its row's"
    made = load(join(tmp_path / "gates", tmp_path / "joined"))
    places = []
    for expert, text in making.PROMPTS.items():
        engine = Engine(made)
        runner = engine._stepper._runner
        ids = made.require_tokenizer().encode(f"{text} 3")
        place = runner.cache.place(len(ids))
        runner.prefill(place, ids)
        assert place.routes is not None
        places.append((expert, place.routes.experts[list(MIXED), 0].tolist()))
    assert places == [(expert, [expert] * len(MIXED)) for expert in range(3)]
    write_gates(gates(parts[0], 3), tmp_path / GATE_FILE)
    fixed = [f"--gates={tmp_path / GATE_FILE}", f"--base={parts[0]}", "--layers=0,2"]
    fixed += [f"--expert={name}={path}" for name, path in experts.items()]
    for gate, pools in (("mean", True), ("token", False)):
        out = tmp_path / gate
        assert main(["anymoe", "join", *fixed, f"--out={out}", f"--gate={gate}"]) == 0
        assert load(out).config.pools is pools
    assert main(["anymoe", "join", *fixed, f"--out={tmp_path / 'x'}", "--gate=max"]) == 2

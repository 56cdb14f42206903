"""Kind a, the model: what StarCoder2's files say wrongly, and what its window can break.

Each docstring names the report and the fault that users of other engines met.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import plain_request
from starquill.engine.runner import Runner
from starquill.errors import CheckpointError, NumericsError, UnsupportedError
from starquill.loading import load
from starquill.nn.activation import ACTIVATIONS
from starquill.nn.attention import attend
from starquill.nn.cache import CacheShape, KvCache, blocks_for
from starquill.types import Delta, EngineOptions, GenerateRequest, SamplingParams
from tests import tiny

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERY, KEY_BIAS = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.bias"
THETAS = (999999.4420358813, 1000000, 100000)


def _close(ours: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours, expected, atol=atol, rtol=0)


def _write(folder: Path, state: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    return tiny.write_checkpoint(folder, tiny.config(**changes), state)


def _steps(deltas: Iterable[Delta]) -> list[tuple[int | None, Any]]:
    """Token ids with their log probabilities: random models repeat ids, so ids prove little."""
    return [
        (d.token_id, pytest.approx(d.logprobs.chosen, abs=1e-5) if d.logprobs else None)
        for d in deltas
    ]


def _after_pieces(loaded: LoadedModel, ids: Sequence[int], pieces: Sequence[int]) -> Tensor:
    """Logits after each piece of `ids`, appended one after the other."""
    assert sum(pieces) == len(ids)
    runner, start, logits = Runner(loaded, blocks_for(len(ids))), 0, []
    place = runner.cache.place(len(ids))
    for piece in pieces:
        logits.append(runner.prefill(place, ids[start : start + piece]))
        start += piece
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "ends", "outside"),
    [
        (0, 500, {0}, [500]),
        (0, 320, {0}, [320]),
        (0, [500, 7], {0, 7}, [500]),
        ([0, 320], ..., {0}, [320]),
        (50256, 49152, {0}, [49152, 50256]),
        (500, 500, {0}, [500]),
        (-1, 0, {0}, [-1]),
        (None, None, {0}, []),
        (..., ..., {0}, []),
        (5, [6, 5], {0, 5, 6}, []),
    ],
)
def test_b01_end_tokens_are_the_union_inside_the_vocabulary(
    tmp_path: Path, in_config: Any, in_generation: Any, ends: set[int], outside: list[int]
) -> None:
    """B01: an end token that cannot be sampled hid the real one, and nothing ever stopped."""
    folder = _write(tmp_path, eos_token_id=in_config, bos_token_id=in_config)
    if in_generation is not ...:
        generation = {"eos_token_id": in_generation, "bos_token_id": in_generation}
        tiny.write_json(folder / "generation_config.json", generation)
    loaded = load(folder)
    assert loaded.end_ids == ends
    assert loaded.warnings == tuple(
        f"end token {i} is outside the vocabulary of 320 and is ignored" for i in outside
    )
    assert plain_request(loaded, "", SamplingParams()).prompt_ids == (0,)
    text = loaded.require_tokenizer().encode("xyz")
    for end in ends:
        model = tiny.scripted(loaded, [*text[:2], end, text[2]], prompt=2)
        deltas = list(Engine(model).generate([9, 9], SamplingParams(max_tokens=4)))
        assert [d.finish_reason for d in deltas] == [None, None, "stop"]
        assert "".join(d.text for d in deltas) == "xy"


def test_b01_no_end_token_at_all_is_said(tmp_path: Path) -> None:
    """B01: with no end token that can be sampled, generation must run on and say why."""
    folder = _write(tmp_path, eos_token_id=320)
    (folder / "tokenizer_config.json").unlink()
    loaded = load(folder)
    assert loaded.end_ids == frozenset()
    assert any("no file names an end token" in warning for warning in loaded.warnings)
    deltas = list(Engine(tiny.scripted(loaded, [0], 1)).generate([9], SamplingParams(max_tokens=3)))
    assert [d.finish_reason for d in deltas] == [None, None, "length"]


@pytest.mark.parametrize("tie", [..., True, False], ids=["absent", "true", "false"])
@pytest.mark.parametrize("shipped", ["none", "copy", "other"])
def test_b03_b04_which_matrix_is_the_head(tmp_path: Path, tie: Any, shipped: str) -> None:
    """B03, B04: a wrong default for a missing key gave a random head, or ignored the shipped one.

    A shipped head that differs is used (docs/models.md), as transformers 5 does; only where the
    config is at odds with the files is there a warning, and it names key and tensor.
    """
    raw = tiny.config(tie_word_embeddings=tie)
    state = tiny.weights(raw, head=True)
    if shipped != "other":
        state[HEAD] = state[EMBEDDING].clone()
    expected = tiny.reference_logits(tiny.config(tie_word_embeddings=False), state, range(1, 21))
    if shipped == "none":
        del state[HEAD]
    loaded = load(tiny.write_checkpoint(tmp_path, raw, state))
    _close(tiny.our_logits(loaded, range(1, 21)), expected)
    at_odds = (shipped == "other") if tie is not False else (shipped == "none")
    assert len(loaded.warnings) == at_odds
    for warning in loaded.warnings:
        assert "tie_word_embeddings" in warning
        assert HEAD in warning
    tied = loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert tied == (shipped != "other")


@pytest.mark.parametrize("tie", [..., True, False], ids=["absent", "true", "false"])
def test_b03_a_head_of_another_shape_is_refused(tmp_path: Path, tie: Any) -> None:
    """B03: a head that does not fit must be named, whatever the config says of tying."""
    raw = tiny.config(tie_word_embeddings=tie)
    state = {**tiny.weights(raw), HEAD: torch.ones(319, 64)}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \[319, 64\] \(expected \[320, 64"):
        load(tiny.write_checkpoint(tmp_path, raw, state))


@pytest.mark.parametrize("theta", THETAS)
def test_b07_theta_is_read_from_every_spelling(tmp_path: Path, theta: float) -> None:
    """B07: a defaulted theta is right for one size only; the error grows with the position."""
    spellings: dict[str, dict[str, Any]] = {
        "flat": {"rope_theta": theta},
        "nested": {
            "rope_theta": ...,
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        },
        "nested wins": {"rope_theta": 1e4, "rope_parameters": {"rope_theta": theta}},
        "type alone is nested": {"rope_theta": theta, "rope_scaling": {"type": "default"}},
        "null beside": {"rope_theta": theta, "rope_parameters": None, "rope_scaling": None},
        "empty beside": {"rope_theta": theta, "rope_parameters": {}},
    }
    ids = tiny.random_ids(64)
    state = tiny.weights(tiny.config())
    flat = tiny.config(rope_theta=theta, sliding_window=None)
    expected = tiny.reference_logits(flat, state, ids)
    for name, spelling in spellings.items():
        loaded = load(_write(tmp_path / name, state, sliding_window=None, **spelling))
        _close(tiny.our_logits(loaded, ids), expected, 2e-5)
    usual = load(_write(tmp_path / "usual", state, sliding_window=None, rope_theta=1e4))
    difference = (tiny.our_logits(usual, ids) - expected).abs().amax(-1)
    assert difference[0] < 1e-5
    assert difference[8:].min() > 1e-3


@pytest.mark.parametrize("name", ["rope_theta", "rope_parameters"])
@pytest.mark.parametrize(
    "theta", [..., None, 0, -1, "1e5", True, float("nan"), [1e5], 10**400], ids=lambda t: str(t)[:9]
)
def test_b07_unusable_theta_is_refused(tmp_path: Path, name: str, theta: Any) -> None:
    """B07: a missing or unreadable theta must be an error, never silently 1e4."""
    changes: dict[str, Any] = {"rope_theta": theta}
    if name == "rope_parameters":
        nested = {"rope_type": "default", "rope_theta": theta}
        changes = {
            "rope_theta": ...,
            "rope_parameters": {key: value for key, value in nested.items() if value is not ...},
        }
    with pytest.raises(CheckpointError, match=r"^config\.json: rope_theta is [^\n]*positive"):
        load(_write(tmp_path, **changes))


@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim", "factor", "beta_fast", "truncate"])
def test_b07_unusable_yarn_numbers_are_refused(tmp_path: Path, key: str) -> None:
    """B07: the same for the other numbers that the frequencies depend on."""
    scaling = {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9}
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key} is 'much'"):
        load(_write(tmp_path, rope_scaling={**scaling, key: "much"}))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 20])
def test_b08_prefill_decode_and_chunks_agree(tmp_path: Path, length: int) -> None:
    """B08: one path saw W keys and another W + 1, or the cache dropped a token at length W."""
    raw, ids = tiny.config(), tiny.random_ids(length)
    state = tiny.weights(raw)
    loaded = load(tiny.write_checkpoint(tmp_path, raw, state))
    expected = tiny.reference_logits(raw, state, ids)
    for chunk in (length, 1, 3, 5, 8, 9):
        _close(tiny.our_logits(loaded, ids, chunk), expected)
    if length == 20:
        for pieces in ((5, 1, 1, 9, 1, 3), (1, 8, 1, 1, 9), (7, 1, 1, 1, 10), (17, 1, 1, 1)):
            ends = torch.tensor(pieces).cumsum(0) - 1
            _close(_after_pieces(loaded, ids, pieces), expected[ends])


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, None])
@pytest.mark.parametrize("chunk", [24, 1, 5])
def test_b08_each_query_sees_exactly_the_window(
    tmp_path: Path, window: int | None, chunk: int
) -> None:
    """B08: in one layer, a token reaches itself and the W - 1 positions after it, no other."""
    loaded = load(_write(tmp_path, num_hidden_layers=1, sliding_window=window))
    ids = tiny.random_ids(24)
    before = tiny.our_logits(loaded, ids, chunk)
    for place in (0, 6, 13, 23):
        changed = [*ids[:place], (ids[place] + 5) % 320, *ids[place + 1 :]]
        difference = (tiny.our_logits(loaded, changed, chunk) - before).abs().amax(-1)
        reached = [p for p in range(24) if difference[p] > 1e-4]
        end = 24 if window is None else min(24, place + window)
        assert reached == list(range(place, end))
        assert sum(difference > 1e-6) == end - place


def test_b09_repeated_and_interleaved_requests_equal_cold_runs(tmp_path: Path) -> None:
    """B09: after the ring had wrapped, a second request saw the first one's tokens."""
    folder = _write(tmp_path)
    ids = tiny.random_ids(20)
    prompts = [ids, [*ids[:12], *tiny.random_ids(9, seed=5)], ids[:3], ids, ids[:8]]
    params = SamplingParams(max_tokens=20, logprobs=0)
    cold = [_steps(Engine(load(folder)).generate(p, params)) for p in prompts]
    engine = Engine(load(folder), prefill_chunk=5)
    assert [_steps(engine.generate(p, params)) for p in prompts] == cold
    running = [engine.generate(p, params) for p in prompts]
    cancelled = engine.generate(ids[3:], params)
    seen: list[list[Delta]] = [[] for _ in prompts]
    for step in range(20):
        if step < 7:
            next(cancelled)
        elif step == 7:
            cancelled.cancel()
        for deltas, generation in zip(seen, running, strict=True):
            deltas.append(next(generation))
    assert [_steps(deltas) for deltas in seen] == cold


@pytest.mark.parametrize("window", [8, None])
def test_b09_a_block_holds_nothing_of_its_past(tmp_path: Path, window: int | None) -> None:
    """B09: a block that was another's must equal a fresh one at every step."""
    loaded = load(_write(tmp_path, sliding_window=window))
    ids = tiny.random_ids(30)
    runner = Runner(loaded, 2, prefill_chunk=5)
    one, other = runner.cache.place(64), runner.cache.place(64)
    for place in (one, other):
        runner.prefill(place, ids)
    for length in (12, 3, 9):
        other.length = 0
        runner.prefill(other, ids[:length])
        expected = tiny.our_logits(loaded, [*ids[:length], *range(40, 52)])
        for step, token in enumerate(range(40, 52)):
            both = runner.decode([one, other], [[7], [token]])
            _close(both[1], expected[length + step], 2e-5)
        one.length = 0
        runner.prefill(one, ids)


@pytest.mark.parametrize("chunk", [512, 100])
@pytest.mark.parametrize(
    ("window", "context"), [(600, 4096), (8, 64), (None, 1200)], ids=["600", "8", "none"]
)
def test_b10_long_prompts_match_at_every_step(
    tmp_path: Path, window: int | None, context: int, chunk: int
) -> None:
    """B10: gibberish beyond the window, where positions or keys were not cut alike.

    Prompts of 3 W + 1 tokens and W more.
    """
    reach = window or context // 4 - 1
    prompt = tiny.random_ids(3 * reach + 1)
    raw = tiny.config(sliding_window=window, max_position_embeddings=context)
    state = tiny.weights(raw)
    span, ids = len(prompt) + reach, list(prompt)
    loaded = load(tiny.write_checkpoint(tmp_path, raw, state))
    runner = Runner(loaded, blocks_for(span), prefill_chunk=chunk)
    place = runner.cache.place(span)
    logits = [runner.prefill(place, prompt)]
    while len(ids) < span:
        ids.append(int(logits[-1].argmax()))
        logits.append(runner.decode([place], [ids[-1:]])[0])
    expected = tiny.reference_logits(raw, state, ids)[len(prompt) - 1 :]
    _close(torch.stack(logits), expected, 5e-5)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_b11_float16_is_never_chosen_silently(tmp_path: Path, stored: torch.dtype) -> None:
    """B11: float16 chosen because the checkpoint, or the machine, suggests it."""
    state = {name: tensor.to(stored) for name, tensor in tiny.weights(tiny.config()).items()}
    loaded = load(_write(tmp_path, state, torch_dtype="float16", dtype="float16"))
    assert loaded.dtype == torch.float32
    assert loaded.model.lm_head.weight.dequantize().dtype == torch.float32
    assert loaded.model.model.layers[0].self_attn.k_proj.bias.dtype == torch.float32


def _overflowing(where: str) -> dict[str, Tensor]:
    """Weights that float16 can hold but not compute with: at once, or once token 7 is read."""
    state = tiny.weights(tiny.config(), head=True)
    if where != "token 7":
        state[where] *= 5e4  # its output reaches 1e5
        return state
    state[EMBEDDING][7] = 60000.0
    for layer in range(2):
        state[f"model.layers.{layer}.mlp.c_proj.bias"] += 8000.0
    return state


@pytest.mark.parametrize("where", ["model.layers.0.mlp.c_fc.weight", QUERY, "token 7"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_b11_overflow_is_an_error_not_an_end(tmp_path: Path, where: str, dtype: Any) -> None:
    """B11: argmax over NaN is id 0, the end token: an empty answer that looks like a clean stop."""
    loaded = load(_write(tmp_path, _overflowing(where)), dtype=dtype)
    assert 0 in loaded.end_ids
    likeliest = SamplingParams(max_tokens=6, logit_bias={7: 1e9})
    generation = Engine(loaded).generate([9, 10, 11], likeliest)
    if dtype != "float16":
        assert [d.token_id for d in generation] == [7] * 6
        return
    deltas: list[Delta] = []
    with pytest.raises(NumericsError, match="not finite in float16; try --dtype float32"):
        deltas.extend(generation)
    assert [d.token_id for d in deltas] == ([7] if where == "token 7" else [])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [EMBEDDING, QUERY, KEY_BIAS, "model.norm.weight"])
def test_b11_damaged_weights_are_an_error(
    tmp_path: Path, name: str, value: float, dtype: Any
) -> None:
    """B11: one NaN or infinity in the files, which torch's attention can turn into zeros."""
    state = tiny.weights(tiny.config())
    state[name].view(-1)[-1] = value
    folder = _write(tmp_path, state)
    with pytest.raises(CheckpointError, match=f"^{name} has values that are not finite"):
        load(folder, dtype=dtype)


@pytest.mark.parametrize("name", [EMBEDDING, HEAD, KEY_BIAS, "model.layers.0.mlp.c_fc.weight"])
@pytest.mark.parametrize(
    ("dtype", "held", "too_much"),
    [("float16", 65519.0, 65520.0), ("float16", -65519.0, -1e30), ("bfloat16", 3.38e38, 3.4e38)],
)
def test_b11_a_weight_that_the_dtype_cannot_hold_is_refused(
    tmp_path: Path, name: str, dtype: Any, held: float, too_much: float
) -> None:
    """B11: narrowing made infinities while loading; the largest value that rounds down loads."""
    state = tiny.weights(tiny.config(), head=True)
    for value, refused in ((held, False), (too_much, True)):
        state[name].view(-1)[3] = value
        folder = _write(tmp_path / str(refused), state)
        load(folder)
        if refused:
            with pytest.raises(NumericsError, match=f"{name}.*{dtype} cannot hold.*float32"):
                load(folder, dtype=dtype)
        else:
            load(folder, dtype=dtype)


def test_b11_norms_and_their_parameters_stay_in_float32(tmp_path: Path) -> None:
    """B11: squares of a residual of 500 overflow float16, so norms must not be computed in it."""
    state = tiny.weights(tiny.config(), head=True)
    state[EMBEDDING] *= 2000.0
    state["model.norm.bias"][5] = 70000.0
    state[HEAD][:, 5] = 0.0
    folder = _write(tmp_path, state)
    half, single = load(folder, dtype="float16"), load(folder)
    assert float(half.model.model.norm.bias[5]) == 70000.0
    half.model.model.norm.bias[5] = single.model.model.norm.bias[5] = 0.0
    ids = tiny.random_ids(20)
    difference = tiny.our_logits(half, ids) - tiny.our_logits(single, ids)
    assert difference.abs().max() < 0.05


@pytest.mark.parametrize(("seen", "tokens"), [(0, 5), (3, 1), (3, 4), (20, 1), (20, 5)])
def test_b11_softmax_is_in_float32(seen: int, tokens: int) -> None:
    """B11: scores of 360,000 exceed float16, whose largest number is 65,504."""
    cache = KvCache(CacheShape(1, 2, 16, window=8), torch.float16, 1)
    values = torch.randn(1, 2, seen + tokens, 16, generator=torch.Generator().manual_seed(0)).half()
    for first, last in ((0, seen), (seen, seen + tokens)):
        if first == last:
            continue
        big = torch.full((1, 4, last - first, 16), 300.0, dtype=torch.float16)
        step = cache.plan(torch.tensor([[1]]), torch.arange(first, last)[None])
        k, v = cache.update(0, big[:, :2], values[:, :, first:last], step)
        out = attend(big, k, v, step)
    # Equal scores: each query's output is the mean of the values that it sees.
    query = seen + tokens - 1
    expected = values[:, :, max(0, query - 7) : query + 1].float().mean(2)  # [1, Hk, Dh]
    _close(out[0, -1].view(2, 2, 16).float(), expected[0, :, None].expand(2, 2, 16), 2e-3)


def test_b11_an_overflow_does_not_outlive_its_request(tmp_path: Path) -> None:
    """B11, B09: NaN keys left in a block poisoned its next sequence beside a longer one."""
    loaded = load(_write(tmp_path, _overflowing("token 7")), dtype="float16")
    alone = tiny.our_logits(loaded, [5, 6, 9, 11])[-1]
    engine = Engine(loaded, EngineOptions(cache_bytes=4 * tiny.cache_block_bytes(loaded)))
    with pytest.raises(NumericsError):
        list(engine.generate([3, *[7] * 20]))
    params = SamplingParams(max_tokens=1, logprobs=5)
    other = engine.generate([20, 21, 22, 23, 24, 25], SamplingParams(max_tokens=3))
    (delta,) = engine.generate([5, 6, 9, 11], params)
    list(other)
    assert delta.logprobs is not None
    expected = alone.log_softmax(-1)
    for entry in delta.logprobs.top:
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=2e-2)


@pytest.mark.parametrize("decoy", [{}, {"activation_function": "gelu"}, {"mlp_act": "relu"}])
@pytest.mark.parametrize(("act", "other"), [("gelu_pytorch_tanh", "gelu"), ("gelu", "relu")])
def test_b12_hidden_act_wins_over_other_keys(
    tmp_path: Path, decoy: dict[str, str], act: str, other: str
) -> None:
    """B12: the 7B's config has a decoy `activation_function: gelu` beside `hidden_act`."""
    raw = {**decoy, **tiny.config(hidden_act=act), **decoy}
    state, ids = tiny.weights(raw), tiny.random_ids(30)
    for layer in range(2):
        state[f"model.layers.{layer}.mlp.c_fc.weight"] *= 2
    ours = tiny.our_logits(load(tiny.write_checkpoint(tmp_path, raw, state)), ids)
    _close(ours, tiny.reference_logits(tiny.config(hidden_act=act), state, ids))
    wrong = tiny.reference_logits(tiny.config(hidden_act=other), state, ids)
    assert (ours - wrong).abs().max() > 1e-4


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_b12_activations_equal_transformers(name: str) -> None:
    """B12: an activation under another's name costs 5e-4 per value, and flips text much later."""
    from transformers.activations import ACT2FN

    x = torch.linspace(-12, 12, 4001)
    _close(ACTIVATIONS[name](x), ACT2FN[name](x), 2e-6)


def test_b12_no_or_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    """B12: an unknown or missing `hidden_act` must not fall back to a decoy or a default."""
    decoy = {"activation_function": "gelu"}
    with pytest.raises(CheckpointError, match="hidden_act is missing"):
        load(_write(tmp_path / "a", hidden_act=..., **decoy))
    for value in ("gelu_python_tanh", "GELU", "", ["gelu"], 3):
        with pytest.raises(UnsupportedError, match=r"hidden_act [^\n]*gelu_pytorch_tanh"):
            load(_write(tmp_path / "b", tiny.weights(tiny.config()), hidden_act=value, **decoy))


def test_b13_a_model_without_biases_loads(tmp_path: Path) -> None:
    """B13: `use_bias: false` was ignored; LayerNorm keeps its biases all the same."""
    raw, ids = tiny.config(use_bias=False), tiny.random_ids(20)
    state = tiny.weights(raw)
    biases = sorted(name for name in state if name.endswith("bias"))
    assert len(biases) == 5
    assert all("norm" in name for name in biases)
    loaded = load(tiny.write_checkpoint(tmp_path, raw, state))
    _close(tiny.our_logits(loaded, ids), tiny.reference_logits(raw, state, ids))


@pytest.mark.parametrize("use_bias", [True, False, ...], ids=["true", "false", "absent"])
def test_b13_every_missing_tensor_is_named(tmp_path: Path, use_bias: Any) -> None:
    """B13: a loader that allows missing keys zeroes a bias, and the model still talks."""
    raw = tiny.config(use_bias=use_bias)
    state = tiny.weights(tiny.config(use_bias=use_bias is not False))
    load(tiny.write_checkpoint(tmp_path, raw, state))
    for name in state:
        rest = {other: tensor for other, tensor in state.items() if other != name}
        with pytest.raises(CheckpointError) as caught:
            load(tiny.write_checkpoint(tmp_path, raw, rest))
        assert str(caught.value) == f"the weights do not fit config.json: missing tensors: {name}"


def test_b13_biases_that_the_config_denies_are_named(tmp_path: Path) -> None:
    """B13: biases in the files with `use_bias: false` must not be dropped silently."""
    state = tiny.weights(tiny.config())
    denied = sorted(name for name in state if name.endswith("bias") and "norm" not in name)
    with pytest.raises(CheckpointError, match=f"unexpected tensors: {', '.join(denied)}$"):
        load(_write(tmp_path, state, use_bias=False))


def test_b11_a_request_object_fails_alone(tmp_path: Path) -> None:
    """B11: a request that overflows ends by its error; others on the same model go on."""
    loaded = load(_write(tmp_path, _overflowing("token 7")), dtype="float16")
    engine, params = Engine(loaded), SamplingParams(max_tokens=5, logit_bias={9: 1e9})
    healthy = engine.generate(GenerateRequest("healthy", (9, 10), params))
    seen = [next(healthy)]
    with pytest.raises(NumericsError):
        list(engine.generate([7, 7, 7], params))
    seen += list(healthy)
    assert [d.token_id for d in seen] == [9] * 5
    assert seen[-1].finish_reason == "length"

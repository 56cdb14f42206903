"""Second moments of activations against a whole model's, and llama.cpp's imatrix."""

from __future__ import annotations

import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from starquill.calibration import TOKENS, _Products, _Watching, cut, second_moments
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import Checkpoint, open_checkpoint
from starquill.checkpoint.source import SafetensorsSource
from starquill.cli.app import main
from starquill.errors import (
    BadRequestError,
    CheckpointError,
    NumericsError,
    UnsupportedError,
)
from starquill.loading import load
from starquill.nn.linear import Linear
from starquill.quant.weight import DenseWeight
from starquill.quantizing import QuantOptions, plan_checkpoint
from tests import tiny

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
C_FC, C_PROJ = (f"model.layers.1.mlp.{name}.weight" for name in ("c_fc", "c_proj"))
PYTHON, RUST = "def f(x):\n    return x\n", "fn f(x: i64) -> i64 { x }\n"


def _open(folder: Path) -> Checkpoint:
    return open_checkpoint(locate(folder))


def _checkpoint(folder: Path, head: bool = False, **changes: Any) -> Checkpoint:
    raw = tiny.config(**changes)
    return _open(tiny.write_checkpoint(folder, raw, tiny.weights(raw, head)))


def _importances(folder: Path, data: Path, quant: str = "4", **more: Any) -> dict[str, Tensor]:
    options = QuantOptions(quant, calibrate=data, **more)
    return dict(plan_checkpoint(_open(folder), options).importances)


def _whole_moments(checkpoint: Checkpoint, texts: list[list[int]]) -> dict[str, Tensor]:
    """Of the whole model in memory, in the chunks of a long prompt."""
    loaded = load(checkpoint.folder)
    watching = {}
    for name, module in loaded.model.named_modules():
        if isinstance(module, Linear):
            watching[f"{name}.weight"] = module.weight = _Watching(module.weight)
    for ids in texts:
        tiny.our_logits(loaded, ids, chunk=512)
    return {n: (w.squares / w.count).float() for n, w in watching.items()}


# --- the moments ---


def test_second_moments_equal_transformers(tmp_path: Path) -> None:
    """Of every Linear's input, over texts of several lengths, past the window."""
    raw = tiny.config()
    checkpoint = _checkpoint(tmp_path)
    texts = [tiny.random_ids(n, seed=n) for n in (5, 30)]
    ours = second_moments(checkpoint, texts).squares
    reference = tiny.reference_model(raw, tiny.weights(raw))
    sums: dict[str, Tensor] = {}

    def watch(name: str) -> None:
        def hook(_: object, inputs: tuple[Tensor], __: object) -> None:
            square = inputs[0].flatten(0, -2).square().sum(0)
            sums[name] = sums.get(name, torch.zeros(())) + square

        reference.get_submodule(name).register_forward_hook(hook)

    names = [name.removesuffix(".weight") for name in ours]
    for name in names:
        watch(name)
    with torch.inference_mode():
        for ids in texts:
            reference(torch.tensor([ids]))
    assert len(names) == 13  # six a layer and the head
    for name in names:
        torch.testing.assert_close(ours[f"{name}.weight"], sums[name] / 35, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ((1,), {}),
        ((1, 8, 9, 64), {"num_hidden_layers": 11}),
        ((1100, 3, 512, 513), {"max_position_embeddings": 2000, "sliding_window": 600}),
        ((700,), {"max_position_embeddings": 800, "sliding_window": None, "use_bias": False}),
        ((600, 20), {"max_position_embeddings": 1024, "sliding_window": 8, "head_dim": 32}),
        (
            (90, 40),
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "num_key_value_heads": 1},
        ),
        ((30,), {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "num_hidden_layers": 1}),
    ],
)
@pytest.mark.parametrize("head", [False, True], ids=["tied", "own head"])
def test_a_layer_at_a_time_is_the_whole_model(
    tmp_path: Path, lengths: tuple[int, ...], changes: dict[str, Any], head: bool
) -> None:
    """Texts longer than a chunk and than the window, alone and together."""
    checkpoint = _checkpoint(tmp_path, head, tie_word_embeddings=not head, **changes)
    texts = [tiny.random_ids(n, seed=n) for n in lengths]
    expected = _whole_moments(checkpoint, texts)
    ours = second_moments(checkpoint, texts).squares
    assert ours.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-5, atol=0)
        assert ours[name].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_computed_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype) for name, tensor in tiny.weights(tiny.config()).items()}
    checkpoint = _open(tiny.write_checkpoint(tmp_path, state=state))
    texts = [tiny.random_ids(20)]
    expected = _whole_moments(checkpoint, texts)
    for name, values in second_moments(checkpoint, texts).squares.items():
        torch.testing.assert_close(values, expected[name], rtol=1e-5, atol=0)


def test_stacked_experts_are_counted_each_on_its_own() -> None:
    """An expert that too few tokens were sent to has no preference among its inputs."""
    data, x = torch.randn(4, 5, 32), torch.randn(40, 32)
    watch = _Watching(DenseWeight(data))
    watch.products = _Products.of(data.shape)
    counts = torch.tensor([17, 0, 20, 3])
    expected = torch.cat([x[:17] @ data[0].T, x[17:37] @ data[2].T, x[37:] @ data[3].T])
    torch.testing.assert_close(watch.matmul_grouped(x, counts), expected)
    watch.matmul_grouped(2 * x[:5], torch.tensor([5, 0, 0, 0]))
    moments = watch.moments("experts")
    assert moments is not None
    assert moments.shape == (4, 32)
    torch.testing.assert_close(
        moments[0], (x[:17].square().sum(0) + 4 * x[:5].square().sum(0)).div(22).float()
    )
    torch.testing.assert_close(moments[2], x[17:37].square().mean(0))
    assert moments[1].tolist() == moments[3].tolist() == [1.0] * 32
    assert watch.unseen == [1, 3]
    assert watch.products is not None
    products = watch.products.mean(watch.count)
    assert products.shape == (4, 1, 32, 32)
    torch.testing.assert_close(products[2, 0], x[17:37].T @ x[17:37] / 20)
    assert bool(products.isfinite().all())
    assert _Watching(DenseWeight(data)).moments("experts") is None


def test_products_of_many_experts_are_left_out() -> None:
    """128 experts of Qwen3-30B's width: half a gigabyte for one stack."""
    assert _Products.of((128, 768, 2048)) is None
    assert _Products.of((8, 64, 2048)) is not None
    assert _Products.of((4, 40)) is None  # no group divides this width


@pytest.mark.parametrize(("place", "named"), [("c_proj", "q_proj"), ("c_fc", "c_proj")])
def test_activations_that_are_not_finite_are_named(tmp_path: Path, place: str, named: str) -> None:
    """Finite weights whose products are not: the first matrix that gets them is named."""
    state = tiny.weights(tiny.config(num_hidden_layers=3))
    state[f"model.layers.0.mlp.{place}.weight"].fill_(3e38)
    raw = tiny.config(num_hidden_layers=3)
    folder = tiny.write_checkpoint(tmp_path / "m", raw, state)
    layer = int(place == "c_proj")
    data = tmp_path / "code.py"
    data.write_text(PYTHON)
    with pytest.raises(NumericsError, match=rf"inputs of model\.layers\.{layer}\..*{named}"):
        _importances(folder, data)


def test_the_last_layer_can_overflow_too(tmp_path: Path) -> None:
    state = tiny.weights(tiny.config())
    state[C_PROJ].fill_(3e38)
    checkpoint = _open(tiny.write_checkpoint(tmp_path, state=state))
    with pytest.raises(NumericsError, match=r"inputs of lm_head\.weight"):
        second_moments(checkpoint, [[1, 2]])


def test_weights_that_do_not_fit_are_told_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tiny.weights(tiny.config())
    del state[C_PROJ]
    checkpoint = _open(tiny.write_checkpoint(tmp_path, state=state))
    monkeypatch.setattr(SafetensorsSource, "read", None)
    with pytest.raises(CheckpointError, match=r"missing tensors.*c_proj"):
        second_moments(checkpoint, [[1, 2]])


# --- memory ---


@pytest.mark.parametrize("head", [False, True], ids=["tied", "own head"])
def test_one_layer_is_alive_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bool
) -> None:
    """Every tensor but a head is read once; what is let go is let go before the next is read."""
    raw = {"num_hidden_layers": 12, "tie_word_embeddings": not head}
    checkpoint = _checkpoint(tmp_path, head, **raw)
    read = SafetensorsSource.read
    alive: dict[str, weakref.ref[Tensor]] = {}
    parts = []

    def counting(self: SafetensorsSource, name: str) -> Tensor:
        held = {_part(n) for n, ref in alive.items() if ref() is not None}
        assert held <= {_part(name)}
        assert name not in alive
        tensor = read(self, name)
        if tensor.ndim == 2:
            alive[name] = weakref.ref(tensor)
            parts.append(_part(name))
        return tensor

    monkeypatch.setattr(SafetensorsSource, "read", counting)
    second_moments(checkpoint, [tiny.random_ids(20), tiny.random_ids(3)])
    assert alive.keys() == {n for n, i in checkpoint.source.infos.items() if len(i.shape) == 2} - {
        HEAD
    }
    assert [p for i, p in enumerate(parts) if p != parts[i - 1]] == [
        EMBEDDING,
        *(f"model.layers.{i}" for i in range(12)),
    ]
    assert not any(ref() is not None for ref in alive.values())


def _part(name: str) -> str:
    match = re.match(r"model\.layers\.\d+", name)
    return match[0] if match else name


_MEASURE = """
import re, sys
from pathlib import Path
from starquill.calibration import second_moments
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import open_checkpoint

def kilobytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

checkpoint = open_checkpoint(locate(Path(sys.argv[1])))
before = kilobytes("VmRSS")
assert len(second_moments(checkpoint, [list(range(100))] * 2).squares) == 73
print(kilobytes("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_process_stays_far_below_the_model(tmp_path: Path) -> None:
    """Twelve layers are 300 MB, one is 25 MB; a step's own values come on top."""
    raw = tiny.config(hidden_size=768, intermediate_size=3072, num_hidden_layers=12)
    raw |= {"max_position_embeddings": 1024}
    small = tiny.weights({**raw, "num_hidden_layers": 1})
    state = {n: t.clone() for i in range(12) for n, t in _renumbered(small, i).items()}
    tiny.write_json(tmp_path / "config.json", raw)
    save_file(state, tmp_path / "model.safetensors")
    dense = sum(tensor.nbytes for tensor in state.values())
    assert dense > 295e6
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 0.4 * dense


def _renumbered(state: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    return {name.replace("layers.0.", f"layers.{layer}."): t for name, t in state.items()}


# --- the texts ---


def _letters(text: str) -> list[int]:
    return [ord(c) for c in text]


@pytest.mark.parametrize(
    ("lengths", "budget", "context", "kept"),
    [
        ((5, 7), 512, 100, [5, 7]),
        ((5, 700), 512, 1000, [5, 507]),
        ((700, 5), 512, 1000, [5, 507]),
        ((600, 600), 512, 1000, [256, 256]),
        ((600, 600), 512, 100, [100, 100, 56, 100, 100, 56]),
        ((0, 9, 0), 512, 100, [9]),
        ((0, 0), 512, 100, []),
        ((), 512, 100, []),
        ((1,), 512, 100, [1]),
        ((900,), 100, 1000, [100]),
        ((250,), 1000, 100, [100, 100, 50]),
        ((10, 10, 1000, 1000), 1024, 5000, [10, 10, 502, 502]),
    ],
)
def test_the_budget_is_spread_over_texts(
    lengths: tuple[int, ...], budget: int, context: int, kept: list[int]
) -> None:
    texts = ["abcdefgh"[i] * n for i, n in enumerate(lengths)]
    ids = cut(texts, _letters, context, budget)
    assert [len(i) for i in ids] == kept
    assert all(len(set(i)) == 1 for i in ids)


def test_of_very_many_texts_some_are_taken_from_everywhere() -> None:
    texts = [chr(1000 + n) * 300 for n in range(1000)]
    ids = cut(texts, _letters, 4096, 1024)
    assert [len(i) for i in ids] == [256] * 4
    assert [i[0] - 1000 for i in ids] == [0, 250, 500, 750]


def test_a_long_text_is_not_encoded_whole() -> None:
    asked: list[int] = []

    def encode(text: str) -> list[int]:
        asked.append(len(text))
        return _letters(text)

    (ids,) = cut(["x" * 50_000_000], encode, 10**6)
    assert len(ids) == TOKENS
    assert sum(asked) < 2_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_checkpoint(tmp_path / "model")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.py").write_text(PYTHON)
    (folder / "b.rs").write_text(RUST)
    (folder / "c.rs").write_text("")
    return folder


@pytest.mark.parametrize(("suffix", "text"), [(".py", PYTHON), (".rs", RUST), ("a.py", PYTHON)])
def test_files_of_a_folder(model: Path, code: Path, suffix: str, text: str) -> None:
    ours = _importances(model, code, suffix=suffix)
    checkpoint = _open(model)
    assert checkpoint.tokenizer is not None
    ids = checkpoint.tokenizer.encode(text)
    expected = second_moments(checkpoint, [ids]).squares
    expected[EMBEDDING] = expected.pop(HEAD)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], values) for name, values in expected.items())


def test_a_text_over_the_context_is_seen_in_pieces(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("".join(chr(97 + i % 7) for i in range(150)))
    checkpoint = _open(model)
    assert checkpoint.tokenizer is not None
    ids = checkpoint.tokenizer.encode(path.read_text())
    context = checkpoint.config.context_length
    assert len(ids) > context
    pieces = [ids[:context], ids[context : 2 * context], ids[2 * context :]]
    expected = second_moments(checkpoint, [piece for piece in pieces if piece]).squares
    ours = _importances(model, path)
    assert all(torch.equal(expected[n], v) for n, v in ours.items() if n in expected)


def test_products_are_of_what_is_asked_for(tmp_path: Path) -> None:
    """Their diagonal is the mean squares; `[in/n, n, n]` and symmetric."""
    checkpoint = _checkpoint(tmp_path)
    texts = [tiny.random_ids(n, seed=n) for n in (5, 30)]
    name = "model.layers.1.mlp.c_proj.weight"
    assert not second_moments(checkpoint, texts).products
    told = second_moments(checkpoint, texts, {name})
    assert list(told.products) == [name]
    products = told.products[name]
    assert products.shape[0] * products.shape[1] == len(told.squares[name])
    diagonal = products.diagonal(dim1=1, dim2=2).flatten()
    torch.testing.assert_close(diagonal, told.squares[name], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(products, products.transpose(1, 2))


def test_with_activations_hqq_is_the_method_and_gets_products(tmp_path: Path) -> None:
    """The tied head's too, for the embedding; with `rtn` asked for there are none."""
    folder = tiny.write_checkpoint(tmp_path / "model", tiny.config(tie_word_embeddings=True))
    text = tmp_path / "code.py"
    text.write_text("def f(x):\n    return x\n")
    checkpoint = _open(folder)
    told = plan_checkpoint(checkpoint, QuantOptions("4", calibrate=text))
    assert EMBEDDING in told.products
    assert told.products.keys() == told.schemes.keys()
    assert {scheme.resolved_method for scheme in told.schemes.values()} == {"hqq"}
    plain = plan_checkpoint(checkpoint, QuantOptions("4-rtn", calibrate=text))
    assert not plain.products
    assert {scheme.resolved_method for scheme in plain.schemes.values()} == {"rtn"}


@pytest.mark.parametrize(
    ("name", "suffix", "said"),
    [
        ("code", ".java", r"code has no \.java files.*--calibrate-suffix"),
        ("code/deep", ".rs", r"deep has no \.rs files"),
        ("code/c.rs", ".py", "c.rs holds no text"),
        ("empty", ".py", r"empty has no \.py files"),
        ("nothing.py", ".py", "nothing.py cannot be read"),
        ("bytes", ".py", r"bytes.b\.py is not UTF-8"),
        ("bytes/b.py", ".py", r"bytes.b\.py is not UTF-8"),
    ],
)
def test_mistakes_are_said(
    model: Path, code: Path, tmp_path: Path, name: str, suffix: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "a.py").write_text(PYTHON)
    (tmp_path / "bytes" / "b.py").write_bytes(b"x = '\xff'")
    with pytest.raises(BadRequestError, match=said):
        _importances(model, tmp_path / name, suffix=suffix)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, code: Path) -> None:
    """Its ids would be rows that the embedding does not have."""
    raw = tiny.config(vocab_size=300)
    folder = tiny.write_checkpoint(tmp_path / "m", raw, tokenizer=tiny.byte_tokenizer())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has ids up to"):
        _importances(folder, code)


def test_without_a_tokenizer_there_is_no_calibration(model: Path, code: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        _importances(model, code)


def test_calibration_changes_the_integers_and_nothing_stays_behind(model: Path, code: Path) -> None:
    plain = load(model, quant="2-rtn")
    calibrated = load(model, quant=QuantOptions("2-rtn", calibrate=code))
    ours, theirs = (m.model.model.layers[0].mlp.c_proj.weight for m in (plain, calibrated))
    assert type(ours) is type(theirs)
    assert not torch.equal(ours.packed, theirs.packed)


@pytest.mark.parametrize("head", [False, True], ids=["tied", "own head"])
def test_text_reaches_every_matrix(
    tmp_path: Path, code: Path, caplog: pytest.LogCaptureFixture, head: bool
) -> None:
    """All but an embedding that is only looked up, and so there is nothing to warn of."""
    folder = _checkpoint(tmp_path / "m", head, tie_word_embeddings=not head).folder
    names = {n for n, i in _open(folder).source.infos.items() if len(i.shape) == 2}
    assert _importances(folder, code).keys() == (names - {EMBEDDING} if head else names)
    assert caplog.records == []


# --- the command line ---


def test_options_reach_the_quantization(
    model: Path, code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["quantize", str(model), "--calibrate", str(code), "--out", str(tmp_path / "out")]
    assert main([*ask, "--calibrate-suffix", ".java"]) == 2
    assert re.fullmatch(r"error: .*no \.java files.*\n", capsys.readouterr().err)
    assert main([*ask, "--calibrate-suffix", ".rs", "--quant", "q4-g128", "--quant-strict"]) == 2
    assert re.fullmatch(r"error: .*cannot have their scheme.*\n", capsys.readouterr().err)
    assert main(["generate", "-p", "x", "-m", str(model), "--quant-strict"]) == 2
    assert "need --quant" in capsys.readouterr().err
    assert main([*ask, "--calibrate-suffix", ".rs", "--quant", "2-rtn"]) == 0
    options = QuantOptions("2-rtn", calibrate=code, suffix=".rs")
    expected, written = load(model, quant=options), load(tmp_path / "out")
    ours, theirs = (m.model.model.layers[1].mlp.c_proj.weight for m in (expected, written))
    assert torch.equal(ours.packed, theirs.packed)

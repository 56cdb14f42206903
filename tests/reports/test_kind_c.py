"""Kind c: adapters that are scaled wrongly, ignored, put on the wrong base, or mixed up.

Each docstring names the report and the fault that users of other engines met.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starquill.adapters.adapter import AdapterPart, BaseModules
from starquill.adapters.opening import open_adapter
from starquill.adapters.store import AdapterStore
from starquill.engine.loaded import LoadedModel
from starquill.errors import AdapterError
from starquill.loading import load
from tests import tiny
from tests.adapters import making
from tests.adapters.test_mlx import as_mlx

Q0 = "model.layers.0.self_attn.q_proj"
PREFIX = "base_model.model."


def _loaded_with(tmp_path: Path, folder: Path) -> tuple[LoadedModel, AdapterStore]:
    loaded = making.base(tmp_path)
    store = AdapterStore(loaded)
    store.load("it", folder)
    return loaded, store


def _refused(tmp_path: Path, folder: Path, *facts: str) -> str:
    """Loading says all `facts` in one printable line, and leaves nothing behind."""
    loaded = making.base(tmp_path)
    before = making.logits(loaded)
    store = AdapterStore(loaded)
    with pytest.raises(AdapterError) as caught:
        store.load("it", folder)
    message = str(caught.value)
    assert message.isprintable()
    for fact in facts:
        assert fact in message
    assert store.list() == ()
    assert torch.equal(making.logits(loaded), before)
    return message


def _close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def _rename(folder: Path, old: str, new: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if old in name:
                tensors[name.replace(old, new)] = tensors.pop(name)

    making.change_tensors(folder, change)


@pytest.mark.parametrize("rslora", [False, True])
def test_b32_rslora_divides_by_the_root_of_the_rank(tmp_path: Path, rslora: bool) -> None:
    """B32: alpha/r was taken for alpha/√r, √r times too weak; and a request's weight got lost."""
    options = {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj"], "use_rslora": rslora}
    folder, expected = making.peft_folder(tmp_path / "it", **options)
    loaded, store = _loaded_with(tmp_path, folder)
    _close(making.logits(loaded, store, {"it": 1}), expected)
    part = open_adapter(folder, BaseModules.of(loaded)).parts[Q0]
    assert part.scale == (4.0 if rslora else 1.0)
    # A request's weight multiplies it: a quarter of one is the whole of the other.
    making.change_config(folder, use_rslora=True)
    store.load("rs", folder)
    if not rslora:
        _close(making.logits(loaded, store, {"rs": 0.25}), expected)


def test_b33_patterns_are_looked_up_as_peft_does(tmp_path: Path) -> None:
    """B33: the first key that matches counts, ranks and alphas each by themselves."""
    options: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"layers.1.self_attn.q_proj": 8, "q_proj": 2},
        "alpha_pattern": {"^model.layers.0.*": 32, "self_attn.q_proj": 1},
    }
    folder, expected = making.peft_folder(tmp_path / "it", **options)
    loaded, store = _loaded_with(tmp_path, folder)
    _close(making.logits(loaded, store, {"it": 1}), expected)
    parts = open_adapter(folder, BaseModules.of(loaded)).parts

    def scale_and_rank(part: AdapterPart) -> tuple[float, int]:
        assert part.a is not None
        return part.scale, part.a.shape[0]

    assert scale_and_rank(parts[Q0]) == (16, 2)
    assert scale_and_rank(parts["model.layers.1.self_attn.q_proj"]) == (1 / 8, 8)
    assert scale_and_rank(parts["model.layers.0.mlp.c_fc"]) == (8, 4)
    assert scale_and_rank(parts["model.layers.1.mlp.c_fc"]) == (2, 4)


def test_b33_a_rank_that_the_tensors_do_not_have(tmp_path: Path) -> None:
    """B33: where config and tensors disagree, scales are wrong: an error names the modules."""
    folder, _ = making.peft_folder(tmp_path / "it", r=4, target_modules=["q_proj", "k_proj"])
    making.change_config(folder, rank_pattern={"q_proj": 2})
    message = _refused(tmp_path, folder, f"{Q0}: A has rank 4", "says 2")
    assert "k_proj" not in message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".layers.0.", ".layer.0."),
        (".layers.1.", ".layers.3."),
        (PREFIX, "transformer."),
        ("lora_A", "lora_a"),
        ("lora_B.weight", "lora_B.other"),
    ],
)
def test_b34_every_tensor_is_used_or_named(tmp_path: Path, old: str, new: str) -> None:
    """B34: an adapter whose names match nothing, or not all, was taken and did nothing."""
    folder, _ = making.peft_folder(tmp_path / "it")
    loaded, store = _loaded_with(tmp_path, folder)
    assert float((making.logits(loaded, store, {"it": 1}) - making.logits(loaded)).abs().max()) > 1
    _rename(folder, old, new)
    _refused(tmp_path / "again", folder, new.strip("."), "no module for")


def test_b34_adapters_of_more_layers_and_without_tensors(tmp_path: Path) -> None:
    """B34: layers 2 and 3 of a model of two; and a file with nothing in it."""
    folder, _ = making.peft_folder(tmp_path / "it")

    def more(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.0." in name]:
            for layer in (2, 3):
                tensors[name.replace(".layers.0.", f".layers.{layer}.")] = tensors[name].clone()

    empty = shutil.copytree(folder, tmp_path / "empty")
    making.change_tensors(folder, more)
    _refused(tmp_path, folder, "model.layers.2.", "last layer is 1")
    making.change_tensors(empty, dict.clear)
    _refused(tmp_path, empty, "has no tensors")


def test_b34_a_or_b_alone_and_all_problems_at_once(tmp_path: Path) -> None:
    """B34: half of an adapter; all that is wrong stands in one error."""
    folder, _ = making.peft_folder(tmp_path / "it", r=4)

    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{PREFIX}{Q0}.lora_B.weight"]
        del tensors[f"{PREFIX}model.layers.1.self_attn.k_proj.lora_A.weight"]
        tensors[f"{PREFIX}model.layers.0.mlp.c_fc.lora_A.weight"] = torch.ones(4, 32)
        tensors[f"{PREFIX}model.layers.0.mlp.gate_proj.lora_A.weight"] = torch.ones(4, 64)
        del tensors[f"{PREFIX}model.layers.1.mlp.c_proj.lora_A.weight"]
        del tensors[f"{PREFIX}model.layers.1.mlp.c_proj.lora_B.weight"]

    making.change_tensors(folder, damage)
    _refused(
        tmp_path,
        folder,
        f"{Q0} has A and no B",
        "model.layers.1.self_attn.k_proj has B and no A",
        "model.layers.0.mlp.c_fc: A is [4, 32] (expected [4, 64]",
        "model.layers.0.mlp.gate_proj",
        "targets modules without A and B: model.layers.1.mlp.c_proj",
    )


def test_b35_another_base(tmp_path: Path) -> None:
    """B35: an adapter for other widths, for other modules, or just of another name."""
    narrow = tiny.config(hidden_size=32, intermediate_size=64)
    other = load(tiny.write_checkpoint(tmp_path / "narrow", narrow))
    folder, _ = making.peft_folder(tmp_path / "it", target_modules=["q_proj"], r=4)
    with pytest.raises(AdapterError) as caught:
        AdapterStore(other).load("it", folder)
    assert f"{Q0}: A is [4, 64] (expected [4, 32]" in str(caught.value)
    assert "weight [32, 32]" in str(caught.value)
    llama = shutil.copytree(folder, tmp_path / "llama")
    _rename(llama, "self_attn.q_proj", "mlp.gate_proj")
    making.change_config(
        llama, base_model_name_or_path="other/llama", target_modules=["gate_proj", "up_proj"]
    )
    _refused(tmp_path, llama, "layers.0.mlp.gate_proj", "c_fc, c_proj")


def test_b35_a_base_of_another_name_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B35: copies lie under all kinds of names; the shapes fit."""
    folder, expected = making.peft_folder(tmp_path / "it")
    making.change_config(folder, base_model_name_or_path="other/llama")
    loaded, store = _loaded_with(tmp_path, folder)
    assert "was made for other/llama, and this is base" in caplog.text
    _close(making.logits(loaded, store, {"it": 1}), expected)
    caplog.clear()
    making.change_config(folder, base_model_name_or_path="/somewhere/else/base")
    store.load("it", folder)
    assert "was made for" not in caplog.text


def _hidden_and_logits(loaded: LoadedModel, store: AdapterStore, alias: str) -> tuple[Tensor, ...]:
    with store.lease({alias: 1}) as lease, torch.inference_mode():
        mix = store.mix_of([lease], [1])
        ids = torch.tensor([making.IDS])
        x = loaded.model.embed(ids, mix)
        return x, loaded.model.logits(x, mix)


@pytest.mark.parametrize("quant", [None, "8"])
def test_b37_tied_head_and_embedding_stay_apart(tmp_path: Path, quant: str | None) -> None:
    """B37: an adapter on the head changed the embedding it is tied to, or the other way round."""
    loaded = making.base(tmp_path, quant=quant, exact=True)
    state = making.weights_of(loaded)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    store, results = AdapterStore(loaded), {}
    for alias, target in (("head", "lm_head"), ("rows", "embed_tokens")):
        folder, expected = making.peft_folder(
            tmp_path / alias, state=state, target_modules=[target]
        )
        store.load(alias, folder)
        _close(making.logits(loaded, store, {alias: 1}), expected)
        results[alias] = _hidden_and_logits(loaded, store, alias)
    with torch.inference_mode():
        x = loaded.model.embed(torch.tensor([making.IDS]))
        assert torch.equal(results["head"][0], x)
        assert not torch.allclose(results["head"][1], loaded.model.logits(x), atol=0.1)
        assert not torch.allclose(results["rows"][0], x, atol=0.1)
        assert torch.equal(results["rows"][1], loaded.model.logits(results["rows"][0]))


def test_b37_an_embedding_that_came_along_is_the_bases(tmp_path: Path) -> None:
    """B37: PEFT saves the embedding beside its adapter; another one would be another model."""
    folder, _ = making.peft_folder(tmp_path / "it", target_modules=["embed_tokens"])
    name = f"{PREFIX}model.embed_tokens.base_layer.weight"
    making.change_tensors(folder, lambda tensors: tensors[name].add_(0.1))
    _refused(tmp_path, folder, "model.embed_tokens", "another model")


@pytest.mark.parametrize("quant", [None, "4"])
def test_b38_dora_scales_whole_rows(tmp_path: Path, quant: str | None) -> None:
    """B38: DoRA read as LoRA; magnitudes along the wrong side; norms of a quantized base."""
    loaded = making.base(tmp_path, quant=quant, exact=True)
    state = making.weights_of(loaded)
    options = {"use_dora": True, "target_modules": ["c_fc", "q_proj"], "r": 4}
    folder, _ = making.peft_folder(tmp_path / "it", state=state, **options)

    def doubled(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "magnitude" in name]:
            path = name.removeprefix(PREFIX).removesuffix(".lora_magnitude_vector")
            tensors[name] = 2 * torch.linalg.norm(state[f"{path}.weight"], dim=1)

    making.change_tensors(folder, doubled)
    expected = dict(state)
    parts = open_adapter(folder, BaseModules.of(loaded)).parts
    assert len(parts) == 4
    for path, part in parts.items():
        assert part.a is not None
        assert part.b is not None
        assert part.magnitude is not None
        weight = state[f"{path}.weight"] + part.scale * part.b @ part.a
        norms = torch.linalg.norm(weight, dim=1)
        expected[f"{path}.weight"] = (part.magnitude / norms)[:, None] * weight
    store = AdapterStore(loaded)
    store.load("it", folder)
    _close(
        making.logits(loaded, store, {"it": 1}),
        tiny.reference_logits(tiny.config(), expected, making.IDS),
    )


@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": r".*\.layers\.[01]\.self_attn\.(q|v)_proj"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1]},
        {
            "target_modules": "all-linear",
            "exclude_modules": ["k_proj", "o_proj", "c_fc", "c_proj"],
        },
        {"target_modules": "ALL-LINEAR", "exclude_modules": r".*(k_proj|o_proj|mlp\..*)"},
    ],
    ids=str,
)
def test_b40_the_tensors_decide(tmp_path: Path, targets: dict[str, Any]) -> None:
    """B40: a string was taken for a list of letters, or matched anywhere, or took in the head."""
    folder, expected = making.peft_folder(tmp_path / "it", target_modules=["q_proj", "v_proj"])
    making.change_config(folder, **targets)
    loaded, store = _loaded_with(tmp_path, folder)
    _close(making.logits(loaded, store, {"it": 1}), expected)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ({"target_modules": "q_proj"}, "does not target it"),  # not all of any name
        ({"target_modules": r".*\.layers\.0\..*"}, "model.layers.1.self_attn.q_proj has A and B"),
        ({"layers_to_transform": [1]}, f"{Q0} has A and B"),
        ({"exclude_modules": ["v_proj"]}, "v_proj has A and B"),
        ({"target_modules": "all-linear"}, "without A and B: model.layers.0.self_attn.k_proj"),
    ],
    ids=str,
)
def test_b40_the_config_must_not_say_otherwise(
    tmp_path: Path, targets: dict[str, Any], said: str
) -> None:
    """B40: an adapter beside another one's config."""
    folder, _ = making.peft_folder(tmp_path / "it", target_modules=["q_proj", "v_proj"])
    making.change_config(folder, **targets)
    message = _refused(tmp_path, folder, said)
    assert "lm_head" not in message


def test_b42_the_same_delta_in_both_forms(tmp_path: Path) -> None:
    """B42: at r = in = out a turn missed loads and is wrong; the scale is alpha/r in one alone."""
    options = {"r": 64, "lora_alpha": 32, "target_modules": ["q_proj", "o_proj"]}
    folder, expected = making.peft_folder(tmp_path / "peft", **options)
    loaded, store = _loaded_with(tmp_path, folder)
    store.load("mlx", as_mlx(folder, tmp_path / "mlx", rank=64, scale=0.5))
    ours = making.logits(loaded, store, {"it": 1})
    _close(ours, expected)
    assert torch.equal(making.logits(loaded, store, {"mlx": 1}), ours)


def _without_config(folder: Path) -> None:
    (folder / making.CONFIG).unlink()


def _of_nobody(folder: Path) -> None:
    tiny.write_json(folder / making.CONFIG, {"rank": 8})


def _of_mlx(folder: Path) -> None:
    tiny.write_json(folder / making.CONFIG, {"lora_parameters": {"rank": 8, "scale": 1.0}})


def _torn(folder: Path) -> None:
    (folder / making.CONFIG).write_text(json.dumps({"r": 8})[:-2], encoding="utf-8")


def _cut(folder: Path) -> None:
    (folder / making.FILE).write_bytes((folder / making.FILE).read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without_config, "PEFT's has peft_type"),
        (_of_nobody, "neither PEFT's"),
        (_of_mlx, "no adapters.safetensors"),
        (_torn, "not valid JSON"),
        (_cut, "damaged or incomplete"),
        (shutil.rmtree, "expected a folder"),
    ],
)
def test_b42_what_was_expected_is_said(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    """B42: a folder of neither form, or of both mixed, failed far from its cause."""
    folder, _ = making.peft_folder(tmp_path / "it")
    damage(folder)
    _refused(tmp_path, folder, said)


def test_b43_keys_tell_apart_all_that_computes_otherwise(tmp_path: Path) -> None:
    """B43: a cache's key that was the adapter's name alone mixed up reloads and weights."""
    first, _ = making.peft_folder(tmp_path / "first", seed=1)
    second, _ = making.peft_folder(tmp_path / "second", seed=2)
    loaded, store = _loaded_with(tmp_path, first)
    store.load("b", second)

    def key(**adapters: float) -> Any:
        with store.lease(adapters) as lease:
            return lease.key

    cold = {"it": making.logits(loaded, store, {"it": 1})}
    keys = [key(), key(it=1), key(b=1), key(it=0.5), key(it=1, b=1), key(it=0.5, b=1)]
    assert key(it=1) == keys[1]
    assert key(b=1, it=1) == keys[4]
    assert key(it=0) == keys[0]
    store.load("it", second)  # other bytes under the same name
    assert not torch.equal(making.logits(loaded, store, {"it": 1}), cold["it"])
    keys.append(key(it=1))
    store.load("it", first)  # and the first ones again
    assert torch.equal(making.logits(loaded, store, {"it": 1}), cold["it"])
    keys.append(key(it=1))
    assert len(set(keys)) == len(keys)

"""Logits are PEFT's own, for all that PEFT can save of a LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starquill.adapters.adapter import BaseModules
from starquill.adapters.store import AdapterStore
from starquill.engine.runner import Runner
from starquill.errors import AdapterError, UnsupportedError
from starquill.loading import load
from starquill.merging import merge_checkpoint
from tests import tiny
from tests.adapters import making

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8},
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True},
    "patterns": {
        "r": 4,
        "rank_pattern": {"layers.1.self_attn.q_proj": 8, "q_proj": 2},
        "alpha_pattern": {"^model.layers.0.*": 32, "self_attn.q_proj": 1},
    },
    "regex": {"target_modules": r".*\.layers\.[01]\.self_attn\.(q|v)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["c_proj"]},
    "excluded by regex": {"target_modules": "all-linear", "exclude_modules": r".*\.1\..*"},
    "one layer": {"layers_to_transform": 1},
    "layers by pattern": {"layers_to_transform": [0], "layers_pattern": "layers"},
    "bias lora_only": {"bias": "lora_only", "target_modules": ["q_proj", "c_fc"]},
    "dora": {"use_dora": True, "r": 4},
    "dora rslora": {"use_dora": True, "use_rslora": True, "r": 4},
    "lora_bias": {"lora_bias": True},
    "lora_bias and bias": {"lora_bias": True, "bias": "lora_only"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding dora": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "embedding and head tied": {
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
    },
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "saved embedding tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "saved linear": {"target_modules": ["q_proj"], "modules_to_save": ["c_fc"]},
    "bias all": {"bias": "all", "target_modules": ["q_proj"]},
    "saved norms": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["norm", "input_layernorm", "post_attention_layernorm"],
    },
    "saved mlp": {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_logits_are_pefts(tmp_path: Path, options: dict[str, Any]) -> None:
    folder, expected = making.peft_folder(tmp_path / "it", **options)
    loaded = making.base(tmp_path)
    store = AdapterStore(loaded)
    store.load("it", folder)
    torch.testing.assert_close(making.logits(loaded, store, {"it": 1}), expected, rtol=0, atol=1e-4)
    stepwise = making.decoded(loaded, store, {"it": 1}, making.IDS)
    torch.testing.assert_close(stepwise, expected, rtol=0, atol=1e-4)
    assert float((making.logits(loaded) - expected).abs().max()) > 0.1


@pytest.mark.parametrize("name", ["plain", "dora", "embedding dora", "saved linear"])
@pytest.mark.parametrize("quant", ["4", "8-g32"])
def test_over_a_quantized_base(tmp_path: Path, name: str, quant: str) -> None:
    """What PEFT computes over the weights written out; activations as they are."""
    loaded = making.base(tmp_path, quant=quant.replace("8-g32", "q8-g32"), exact=True)
    state = making.weights_of(loaded)
    folder, expected = making.peft_folder(tmp_path / "it", state=state, **OPTIONS[name])
    store = AdapterStore(loaded)
    store.load("it", folder)
    torch.testing.assert_close(making.logits(loaded, store, {"it": 1}), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "dora", "embedding", "saved head"])
def test_stored_in_two_bytes(tmp_path: Path, name: str, stored: torch.dtype) -> None:
    folder, _ = making.peft_folder(tmp_path / "it", **OPTIONS[name])
    making.change_tensors(
        folder, lambda tensors: tensors.update({k: v.to(stored) for k, v in tensors.items()})
    )
    wide = tmp_path / "wide"
    wide.mkdir()
    for file in (making.CONFIG, making.FILE):
        (wide / file).write_bytes((folder / file).read_bytes())
    making.change_tensors(
        wide, lambda tensors: tensors.update({k: v.float() for k, v in tensors.items()})
    )
    loaded = making.base(tmp_path)
    store = AdapterStore(loaded)
    assert store.load("it", folder).nbytes * 2 == store.load("wide", wide).nbytes
    ours, same = (making.logits(loaded, store, {alias: 1}) for alias in ("it", "wide"))
    torch.testing.assert_close(ours, same, rtol=0, atol=2e-5)


def test_norms_that_came_along_unchanged_are_left_out(tmp_path: Path) -> None:
    """`bias="all"` saves those of all norms, whatever was learned."""
    folder, _ = making.peft_folder(tmp_path / "it", bias="all", target_modules=["q_proj"])
    loaded = making.base(tmp_path)
    own = dict(loaded.model.named_parameters())
    prefix = "base_model.model."

    def unlearn(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if "norm" in n]:
            tensors[name] = own[name.removeprefix(prefix)].data.clone()

    making.change_tensors(folder, unlearn)
    store = AdapterStore(loaded)
    store.load("it", folder)
    assert not any(norm.bank for norm in BaseModules.of(loaded).norms.values())


@pytest.mark.parametrize("name", ["saved norms", "bias all"])
def test_norms_of_each_row(tmp_path: Path, name: str) -> None:
    """Rows with two adapters, a mix, half of one and none, as if each were alone, to the bit."""
    loaded = making.base(tmp_path)
    base = making.logits(loaded)
    store = AdapterStore(loaded)
    for seed in (1, 2):
        folder, _ = making.peft_folder(tmp_path / str(seed), seed, **OPTIONS[name])
        store.load(str(seed), folder)
    mixes: list[dict[str, float]] = [{"1": 1}, {}, {"1": 0.7, "2": 0.3}, {"2": 1}, {"2": 0.5}, {}]
    texts = [tiny.random_ids(9, seed=40 + n) for n in range(len(mixes))]
    alone = [making.decoded(loaded, store, mix, ids) for mix, ids in zip(mixes, texts, strict=True)]
    runner = Runner(loaded, len(mixes))
    places = [runner.cache.place(9) for _ in mixes]
    mix = store.mix_of([store.lease(mix) for mix in mixes], [1] * len(mixes))
    for step in range(9):
        rows = runner.decode(places, [[ids[step]] for ids in texts], mix)
        for row, expected in zip(rows, alone, strict=True):
            assert torch.equal(row, expected[step])
    assert torch.equal(making.logits(loaded), base)


def test_norms_merged(tmp_path: Path) -> None:
    folder, expected = making.peft_folder(tmp_path / "it", **OPTIONS["saved norms"])
    making.base(tmp_path)
    merge_checkpoint(tmp_path / "base", {str(folder): 1.0}, tmp_path / "merged")
    merged = making.logits(load(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-4)


def test_norms_in_part_do_what_they_do_merged(tmp_path: Path) -> None:
    shares = {}
    for seed, share in ((1, 0.7), (2, -0.3)):
        folder, _ = making.peft_folder(tmp_path / str(seed), seed, **OPTIONS["saved norms"])
        shares[str(folder)] = share
    loaded = making.base(tmp_path)
    store = AdapterStore(loaded)
    for path in shares:
        store.load(path, path)
    merge_checkpoint(tmp_path / "base", shares, tmp_path / "merged")
    merged = making.logits(load(tmp_path / "merged"))
    acting = making.logits(loaded, store, shares)
    torch.testing.assert_close(acting, merged, rtol=0, atol=1e-4)


def test_norms_that_do_not_fit(tmp_path: Path) -> None:
    folder, _ = making.peft_folder(tmp_path / "it", **OPTIONS["saved norms"])
    name = "base_model.model.model.norm.weight"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][1:].clone()
        del tensors["base_model.model.model.layers.1.input_layernorm.weight"]

    making.change_tensors(folder, spoil)
    store = AdapterStore(making.base(tmp_path))
    with pytest.raises(AdapterError) as told:
        store.load("it", folder)
    assert r"model.norm.weight is [63] (expected [64])" in str(told.value)
    assert "without a weight: model.layers.1.input_layernorm" in str(told.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"something_new": {"a": 1}}, "something_new"),
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        *(
            ({"init_lora_weights": init}, init)
            for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
        ),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_named(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder, _ = making.peft_folder(tmp_path / "it")
    making.change_config(folder, **changes)
    with pytest.raises(UnsupportedError, match=said):
        AdapterStore(making.base(tmp_path)).load("it", folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"bias": "some"}, "bias is 'some'"),
        ({"rank_pattern": {"(": 3}}, "no regular expression"),
        ({"target_modules": 3}, "target_modules"),
        ({"layers_to_transform": ["a"]}, "layers_to_transform"),
        ({"use_dora": True}, "no magnitude"),
        ({"lora_bias": True}, "no bias of B"),
        ({"target_modules": ["q_proj"]}, "does not target it"),
        ({"target_modules": [*making.ALL, "lm_head"]}, "without A and B: lm_head"),
        ({"modules_to_save": ["lm_head"]}, "without a weight: lm_head"),
    ],
    ids=str,
)
def test_contradictions_are_errors(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder, _ = making.peft_folder(tmp_path / "it")
    making.change_config(folder, **changes)
    with pytest.raises(AdapterError, match=said):
        AdapterStore(making.base(tmp_path)).load("it", folder)


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder, _ = making.peft_folder(tmp_path / "it")
    (folder / making.FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match=r"adapter_model\.bin.*can run code"):
        AdapterStore(making.base(tmp_path)).load("it", folder)


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    folder, _ = making.peft_folder(tmp_path / "it")
    making.change_tensors(folder, lambda tensors: next(iter(tensors.values())).fill_(torch.nan))
    with pytest.raises(AdapterError, match="not finite"):
        AdapterStore(making.base(tmp_path)).load("it", folder)

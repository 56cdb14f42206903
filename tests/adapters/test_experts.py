"""Adapters of mixtures, on experts one by one and on stacks of them: logits are PEFT's own."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from starquill.adapters.adapter import BaseModules
from starquill.adapters.store import AdapterStore
from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from starquill.errors import AdapterError, StarquillError, UnsupportedError
from starquill.loading import load
from starquill.merging import MergeOptions, merge_checkpoint
from starquill.nn.experts import ExpertLinear
from starquill.quantizing import QuantOptions, quantize_checkpoint
from tests import moe, tiny
from tests.adapters import making

FAMILY = "starcoder2_moe"
STACKED = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
SINGLE: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "c_fc", "c_proj"]},
    "all-linear": {"target_modules": "all-linear", "use_rslora": True},
    "some experts": {"target_modules": r".*\.experts\.[02]\.c_(fc|proj)"},
    "one layer": {"target_modules": ["c_fc"], "layers_to_transform": [1]},
    "patterns": {
        "target_modules": ["c_fc"],
        "rank_pattern": {r"experts\.1\.c_fc": 2},
        "alpha_pattern": {r"layers\.0\.mlp\.experts\.2\.c_fc": 32},
    },
    "dora": {"target_modules": ["c_fc", "c_proj"], "use_dora": True},
    "bias": {"target_modules": ["c_fc", "c_proj"], "bias": "lora_only"},
    "lora_bias": {"target_modules": ["c_proj"], "lora_bias": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["experts.1.c_fc"]},
    "attention and router": {"target_modules": ["q_proj", "o_proj", "gate"]},
}
STACKS: dict[str, dict[str, Any]] = {
    "both": STACKED,
    "one of two": {"target_parameters": ["experts.down_proj"], "use_rslora": True},
    "the other": {"target_parameters": ["experts.gate_up_proj"]},
    "router, ranks and attention": {
        "target_modules": ["q_proj"],
        "target_parameters": ["gate_up_proj", "gate.weight", "down_proj"],
        "rank_pattern": {r".*\.gate_up_proj": 6, "mlp.gate.weight": 3},
        "alpha_pattern": {"down_proj": 32},
    },
    "one layer": {"target_parameters": ["layers.1.mlp.experts.gate_up_proj"]},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def wrapped(raw: dict[str, Any], seed: int = 1, **options: Any) -> Any:
    """The reference with an adapter that is random all over."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "target_modules": [], **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(moe.reference(raw), config).eval()
    making.randomize({n: p for n, p in model.named_parameters() if p.requires_grad}, seed)
    return model


def adapted(top: Path, family: str, **options: Any) -> tuple[Path, Path, Tensor]:
    """A base, an adapter for it, and PEFT's logits `[T, V]`."""
    raw = moe.config(family)
    base = moe.write(top / "base", raw, moe.reference(raw))
    model = wrapped(raw, **options)
    return base, making.save(model, top / "adapter"), moe.logits(model, making.IDS)


def check(base: Path, adapter: Path, expected: Tensor) -> None:
    """While it acts, a prompt at once and token by token."""
    loaded = load(base)
    before = making.logits(loaded)
    store = AdapterStore(loaded)
    store.load("it", adapter)
    torch.testing.assert_close(making.logits(loaded, store, {"it": 1}), expected, rtol=0, atol=1e-4)
    stepwise = making.decoded(loaded, store, {"it": 1}, making.IDS)
    torch.testing.assert_close(stepwise, expected, rtol=0, atol=1e-4)
    assert float((before - expected).abs().max()) > 0.1
    assert torch.equal(making.logits(loaded), before)


@pytest.mark.parametrize("options", SINGLE.values(), ids=SINGLE.keys())
def test_experts_one_by_one(tmp_path: Path, options: dict[str, Any]) -> None:
    check(*adapted(tmp_path, FAMILY, **options))


@pytest.mark.parametrize("family", moe.PUBLISHED)
@pytest.mark.parametrize("options", STACKS.values(), ids=STACKS.keys())
def test_stacks(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    if family == "phimoe":  # its router is a Linear called so
        options = json.loads(json.dumps(options).replace("gate.weight", "router.weight"))
    check(*adapted(tmp_path, family, **options))


def older(raw: dict[str, Any], folder: Path, names: list[str], **more: Any) -> Path:
    """An adapter as it was made with transformers 4, where each expert had modules of its own."""
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6},
        **{"target_modules": ["q_proj", *names], **more},
    }
    width, inner = raw["hidden_size"], raw.get("moe_intermediate_size", raw["intermediate_size"])
    mlp = "block_sparse_moe" if names[0] == "w1" else "mlp"
    generator, tensors = torch.Generator().manual_seed(5), {}

    def add(path: str, outputs: int, inputs: int) -> None:
        key = f"base_model.model.model.layers.{path}.lora_"
        tensors[f"{key}A.weight"] = 0.3 * torch.randn(3, inputs, generator=generator)
        tensors[f"{key}B.weight"] = 0.3 * torch.randn(outputs, 3, generator=generator)

    for layer in range(raw["num_hidden_layers"]):
        heads = raw["num_attention_heads"] * raw.get("head_dim", width // 4)
        add(f"{layer}.self_attn.q_proj", heads, width)
        for expert in range(raw.get("num_experts") or raw["num_local_experts"]):
            for name in names:
                down = name in ("w2", "down_proj")
                ends = (width, inner) if down else (inner, width)
                add(f"{layer}.{mlp}.experts.{expert}.{name}", *ends)
    folder.mkdir()
    tiny.write_json(folder / making.CONFIG, config)
    save_file(tensors, folder / making.FILE)
    return folder


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("mixtral", ["w1", "w2", "w3"]),
        ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"]),
        ("olmoe", ["gate_proj", "up_proj", "down_proj"]),
    ],
)
def test_those_made_before_experts_were_stacked(
    tmp_path: Path, family: str, names: list[str]
) -> None:
    """PEFT turns them into stacks when it loads them."""
    raw = moe.config(family)
    model = moe.reference(raw)
    base = moe.write(tmp_path / "base", raw, model)
    adapter = older(raw, tmp_path / "adapter", names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = peft.PeftModel.from_pretrained(model, adapter).eval()
    check(base, adapter, moe.logits(reference, making.IDS))


def test_an_older_pefts_stacks_are_the_other_way_round(tmp_path: Path) -> None:
    """PEFT 0.18 took [E, out, in] for [E, in, out]; its own rule, written out, is the reference."""
    raw = moe.config("mixtral")
    model = moe.reference(raw)
    base = moe.write(tmp_path / "base", raw, model)
    folder = making.save(wrapped(raw, **STACKED), tmp_path / "adapter")
    experts, r = raw["num_local_experts"], 4

    def turn(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n and "lora_A" in n]:
            a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
            tensors[name] = torch.randn(len(a), len(b), generator=torch.Generator().manual_seed(1))
            tensors[name.replace("lora_A", "lora_B")] = 0.1 * torch.randn(
                a.shape[1], len(a), generator=torch.Generator().manual_seed(2)
            )

    making.change_tensors(folder, turn)
    making.change_config(folder, peft_version="0.18.0")
    tensors = dict(load_all(folder))
    for layer, block in enumerate(model.model.layers):
        path = f"base_model.model.model.layers.{layer}.mlp.experts"
        for name, key in (("gate_up_proj", f"{path}.base_layer"), ("down_proj", path)):
            a = tensors[f"{key}.lora_A.weight"].reshape(experts, r, -1)
            b = tensors[f"{key}.lora_B.weight"].reshape(-1, r, experts)
            with torch.no_grad():
                getattr(block.mlp.experts, name).add_(torch.einsum("ore,eri->eio", b, a) * 2)
    check(base, folder, moe.logits(model, making.IDS))


def load_all(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    making.change_tensors(folder, found.update)
    return found


def test_square_stacks_need_a_version(tmp_path: Path) -> None:
    """Which way they are to be read, shapes do not tell."""
    raw = moe.config("mixtral", intermediate_size=32)  # gate and up are 64 rows of 64
    base = moe.write(tmp_path / "base", raw, moe.reference(raw))
    model = wrapped(raw, target_parameters=["gate_up_proj"])
    folder = making.save(model, tmp_path / "adapter")
    check(base, folder, moe.logits(model, making.IDS))
    making.change_config(folder, peft_version=None)
    with pytest.raises(UnsupportedError, match="peft_version"):
        AdapterStore(load(base)).load("it", folder)


@pytest.mark.parametrize("family", [FAMILY, "qwen3_moe"])
def test_one_batch_of_many(tmp_path: Path, family: str) -> None:
    """Eight rows, four adapters, a mix, and the base: each as if it were alone, to the bit."""
    raw = moe.config(family)
    loaded = load(moe.write(tmp_path / "base", raw, moe.reference(raw)), quant="8")
    options = STACKED if family != FAMILY else {"target_modules": ["q_proj", "c_fc", "c_proj"]}
    store = AdapterStore(loaded)
    for seed in range(4):
        folder = making.save(wrapped(raw, seed, **options), tmp_path / str(seed))
        store.load(str(seed), folder)
    mixes: list[dict[str, float]] = [
        *({str(n): 1.0} for n in range(4)),
        {"0": 0.7, "2": 0.3},
        {},
        {"1": -0.5},
        {},
    ]
    texts = [tiny.random_ids(9, seed=30 + n) for n in range(len(mixes))]
    alone = [making.decoded(loaded, store, mix, ids) for mix, ids in zip(mixes, texts, strict=True)]
    runner = Runner(loaded, 8)
    places = [runner.cache.place(9) for _ in texts]
    mix = store.mix_of([store.lease(mix) for mix in mixes], [1] * 8)
    for step in range(9):
        rows = runner.decode(places, [[ids[step]] for ids in texts], mix)
        for row, expected in zip(rows, alone, strict=True):
            assert torch.equal(row, expected[step])
    base = load(tmp_path / "base", quant="8")
    assert torch.equal(alone[5], torch.cat(steps(base, texts[5])))


def steps(loaded: LoadedModel, ids: list[int]) -> list[Tensor]:
    runner = Runner(loaded, 1)
    place = runner.cache.place(len(ids))
    return [runner.decode([place], [[token]]) for token in ids]


@pytest.mark.parametrize("name", ["plain", "dora", "saved"])
def test_over_quantized_experts(tmp_path: Path, name: str) -> None:
    """What PEFT computes over the weights written out."""
    raw = moe.config(FAMILY)
    path = moe.write(tmp_path / "base", raw, moe.reference(raw))
    loaded = load(path, quant="4", exact=True)
    model = moe.reference(raw)
    state = model.state_dict()
    with torch.no_grad():
        for key, module in loaded.model.named_modules():
            if isinstance(module, ExpertLinear):
                for expert, weight in enumerate(module.weight.dequantize()):
                    state[f"{key}.weight".replace("experts.", f"experts.{expert}.")].copy_(weight)
            elif f"{key}.weight" in state and hasattr(module.weight, "dequantize"):
                state[f"{key}.weight"].copy_(module.weight.dequantize())
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, **SINGLE[name])
    tuned = peft.get_peft_model(model, config).eval()
    making.randomize({n: p for n, p in tuned.named_parameters() if p.requires_grad}, 1)
    folder = making.save(tuned, tmp_path / "adapter")
    store = AdapterStore(loaded)
    store.load("it", folder)
    expected = moe.logits(tuned, making.IDS)
    torch.testing.assert_close(making.logits(loaded, store, {"it": 1}), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", [FAMILY, "qwen3_moe"])
def test_where_products_round_activations(tmp_path: Path, family: str) -> None:
    """Experts whose rows are worked on all at once: adapters of nothing else act on them.

    Every token goes to all experts, since rounding may change a choice.
    """
    raw = moe.config(family)
    raw["num_experts_per_tok"] = raw.get("num_experts") or raw["num_local_experts"]
    base = moe.write(tmp_path / "base", raw, moe.reference(raw))
    options = STACKED if family != FAMILY else {"target_modules": ["c_fc", "c_proj"]}
    folder = making.save(wrapped(raw, **options), tmp_path / "adapter")
    found = []
    for exact in (False, True):
        loaded = load(base, quant="8", exact=exact)
        store = AdapterStore(loaded)
        store.load("it", folder)
        prompt = making.logits(loaded, store, {"it": 1})
        stepwise = making.decoded(loaded, store, {"it": 1}, making.IDS)
        found.append((prompt, stepwise, making.logits(loaded)))
    (prompt, stepwise, _), (expected, _, without) = found
    effect = float((without - expected).abs().max())
    assert float((prompt - expected).abs().max()) < effect / 10
    assert float((stepwise - expected).abs().max()) < effect / 10


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (FAMILY, SINGLE["some experts"]),
        (FAMILY, SINGLE["dora"]),
        (FAMILY, SINGLE["bias"]),
        (FAMILY, SINGLE["saved"]),
        (FAMILY, SINGLE["attention and router"]),
        ("mixtral", STACKS["router, ranks and attention"]),
        ("qwen3_moe", STACKED),
    ],
)
def test_merged(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    base, adapter, expected = adapted(tmp_path, family, **options)
    merge_checkpoint(base, {str(adapter): 1.0}, tmp_path / "merged")
    merged = making.logits(load(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-4)


def test_merged_in_part_over_a_quantized_base(tmp_path: Path) -> None:
    """Two adapters by weight; what they change comes out dense, and does what they did."""
    raw = moe.config("olmoe")
    plain = moe.write(tmp_path / "plain", raw, moe.reference(raw))
    base = tmp_path / "base"
    quantize_checkpoint(plain, base, QuantOptions("4"))
    first, second = (
        making.save(wrapped(raw, seed, **STACKED), tmp_path / str(seed)) for seed in (1, 2)
    )
    shares = {str(first): 0.7, str(second): 0.3}
    merge_checkpoint(base, shares, tmp_path / "merged", MergeOptions(dtype="float32"))
    loaded = load(base, exact=True)
    store = AdapterStore(loaded)
    for path in shares:
        store.load(path, path)
    acting = making.logits(loaded, store, shares)
    merged = making.logits(load(tmp_path / "merged", exact=True))
    torch.testing.assert_close(merged, acting, rtol=0, atol=1e-4)


def drop(part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[next(name for name in tensors if part in name)]

    return change


def rename(part: str, other: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if part in n]:
            tensors[name.replace(part, other)] = tensors.pop(name)

    return change


def cut(part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if part in name)
        tensors[name] = tensors[name][1:].clone()

    return change


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        (FAMILY, drop("0.mlp.experts.1.c_fc.lora_B"), r"experts\.1\.c_fc has A and no B"),
        (FAMILY, drop("1.mlp.experts.2.c_fc.lora_A"), r"layers\.1\.mlp\.experts\.2\.c_fc has B"),
        (FAMILY, rename("experts.2.", "experts.3."), r"no module for .*experts\.3\.c_fc"),
        (FAMILY, cut("experts.1.c_fc.lora_B"), r"experts\.1\.c_fc: B is \[95, 4\] \(expected \[96"),
        ("olmoe", drop("0.mlp.experts.base_layer.lora_A"), "gate_up_proj has B and no A"),
        ("olmoe", cut("0.mlp.experts.lora_A"), r"down_proj: A is \[23, 96\] \(expected \[24, 96\]"),
        ("olmoe", rename(".experts.base_layer.", ".experts.other."), r"experts\.other\.lora_A"),
        (
            "olmoe",
            rename(".experts.base_layer.", ".experts.base_layer.base_layer."),
            "A and B of 2 parameters, and target_parameters names gate_up_proj, down_proj",
        ),
    ],
)
def test_what_does_not_fit_is_told(
    tmp_path: Path, family: str, change: Callable[[dict[str, Tensor]], None], said: str
) -> None:
    options = STACKED if family != FAMILY else {"target_modules": ["c_fc"]}
    base, adapter, _ = adapted(tmp_path, family, **options)
    making.change_tensors(adapter, change)
    store = AdapterStore(load(base))
    with pytest.raises(AdapterError, match=said):
        store.load("it", adapter)
    assert store.list() == ()


@pytest.mark.parametrize("key", ["use_dora", "lora_bias"])
def test_what_peft_does_not_do_on_parameters_is_refused(tmp_path: Path, key: str) -> None:
    base, adapter, _ = adapted(tmp_path, "olmoe", **STACKED)
    making.change_config(adapter, **{key: True})
    with pytest.raises(UnsupportedError, match=f"{key} with target_parameters"):
        AdapterStore(load(base)).load("it", adapter)


def test_experts_that_are_deltas_are_refused_by_name(tmp_path: Path) -> None:
    """They share one MLP, and have no weights of their own to adapt."""
    _, adapter, _ = adapted(tmp_path, FAMILY, target_modules=["q_proj", "c_fc"])
    raw = moe.config(FAMILY, expert_rank=2)
    loaded = load(tiny.write_checkpoint(tmp_path / "deltas", raw))
    with pytest.raises(UnsupportedError, match=r"single experts.*experts\.0\.c_fc\.lora_A"):
        AdapterStore(loaded).load("it", adapter)


def test_unloading_frees_all(tmp_path: Path) -> None:
    base, adapter, _ = adapted(tmp_path, "olmoe", **STACKED)
    loaded = load(base)
    store = AdapterStore(loaded)
    store.load("it", adapter)
    stacks = BaseModules.of(loaded).stacks.values()
    assert all(stack.lora is not None and stack.lora.parts for stack in stacks)
    store.unload("it")
    assert not any(stack.lora is not None and stack.lora.parts for stack in stacks)


@pytest.mark.parametrize(("family", "mlp"), [("mixtral", "block_sparse_moe"), ("olmoe", "mlp")])
def test_mlx_has_stacks_whole(tmp_path: Path, family: str, mlp: str) -> None:
    """A `[E, R, in]` and B `[E, out, R]`, in a `LoRASwitchLinear`; what PEFT's form gives."""
    raw = moe.config(family)
    base = moe.write(tmp_path / "base", raw, moe.reference(raw))
    model = wrapped(raw, target_modules=[], **STACKED)
    making.save(model, tmp_path / "peft")
    tensors, turned = load_all(tmp_path / "peft"), {}
    experts = raw.get("num_experts") or raw["num_local_experts"]
    for layer in range(2):
        key = f"base_model.model.model.layers.{layer}.mlp.experts"
        path = f"model.layers.{layer}.{mlp}.switch_mlp"
        for wrapper, names in ((".base_layer", ("gate_proj", "up_proj")), ("", ("down_proj",))):
            a = tensors[f"{key}{wrapper}.lora_A.weight"].unflatten(0, (experts, 4))  # [E, R, in]
            b = tensors[f"{key}{wrapper}.lora_B.weight"].unflatten(1, (4, experts))  # [out, R, E]
            for name, rows in zip(names, b.permute(2, 0, 1).chunk(len(names), 1), strict=True):
                turned[f"{path}.{name}.lora_a"] = a.clone()
                turned[f"{path}.{name}.lora_b"] = rows.contiguous()
    folder = tmp_path / "mlx"
    folder.mkdir()
    save_file(turned, folder / "adapters.safetensors")
    parameters = {"rank": 4, "scale": 2.0}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    tiny.write_json(folder / making.CONFIG, config)
    check(base, folder, moe.logits(model, making.IDS))


def test_size_counts_the_a_of_two_stacks_once(tmp_path: Path) -> None:
    base, adapter, _ = adapted(tmp_path, "olmoe", **STACKED)
    stored = sum(t.numel() * t.element_size() for t in load_all(adapter).values())
    assert AdapterStore(load(base)).load("it", adapter).nbytes == stored


def test_an_x_lora_of_experts_is_refused(tmp_path: Path) -> None:
    base, adapter, _ = adapted(tmp_path, "olmoe", **STACKED)
    top = tmp_path / "xlora"
    top.mkdir()
    adapter.rename(top / "one")
    tiny.write_json(top / "xlora_config.json", {"hidden_size": 64, "adapters": ["one"]})
    save_file({"last.weight": torch.zeros(1, 64)}, top / "xlora_classifier.safetensors")
    with pytest.raises(StarquillError, match=r"is an expert, which it cannot weigh"):
        load(base, xlora=top)

"""Tiny random mixtures, written as transformers writes them, and their references."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from tests import tiny

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
# Shapes that no two matrices share by accident, counts that are no power of two.
RAW: dict[str, dict[str, Any]] = {
    "mixtral": {**COMMON, "num_local_experts": 5, "sliding_window": None},
    "qwen3_moe": {
        **COMMON,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "head_dim": 32,
        "norm_topk_prob": True,
    },
    "olmoe": {**COMMON, "num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.8},
    "phimoe": {
        **COMMON,
        "num_local_experts": 5,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.2,  # so that it decides often
    },
    "starcoder2_moe": {
        **{k: v for k, v in COMMON.items() if k not in ("tie_word_embeddings", "pad_token_id")},
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "sliding_window": 8,
        "num_local_experts": 3,
    },
}
PUBLISHED = ("mixtral", "qwen3_moe", "olmoe", "phimoe")
_CLASSES = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe", "phimoe": "Phimoe"}


def config(family: str, **changes: Any) -> dict[str, Any]:
    """Its tiny config; a change to `...` removes the key."""
    merged = {**RAW[family], "model_type": family, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def reference(raw: Mapping[str, Any], seed: int = 0) -> Any:
    """A random model in transformers, float32: biases and norms too, so that none hides."""
    settings = {k: v for k, v in raw.items() if k != "model_type"}
    if raw["model_type"] == "starcoder2_moe":
        model = _starcoder2_moe(settings)
    else:
        name = _CLASSES[raw["model_type"]]
        made = getattr(transformers, f"{name}Config")(**settings)
        made._attn_implementation = "eager"
        made._experts_implementation = "eager"
        model = getattr(transformers, f"{name}ForCausalLM")(made)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in path and path.endswith("weight")
            scale = 0.3 if parameter.ndim == 1 else 0.15
            parameter.copy_(1 + 0.3 * values if is_norm else values * scale)
    return model.float().eval()


class _Starcoder2Moe(nn.Module):
    """The mixture as its definition reads: every token through its experts, one by one."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2MLP

        self.top, self.normalise = made.num_experts_per_tok, made.norm_topk_prob
        self.gate = nn.Linear(made.hidden_size, made.num_local_experts, bias=made.gate_bias)
        self.experts = nn.ModuleList(Starcoder2MLP(made) for _ in range(made.num_local_experts))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for row, token in enumerate(x[0]):
            best = probabilities[0, row].argsort(descending=True)[: self.top]
            weights = probabilities[0, row, best]
            weights = weights / weights.sum() if self.normalise else weights
            for expert, weight in zip(best.tolist(), weights, strict=True):
                out[0, row] += weight * self.experts[expert](token[None])[0]
        return out


def _starcoder2_moe(settings: dict[str, Any]) -> Any:
    given = {"norm_topk_prob": True, "gate_bias": False, "mlp_only_layers": [], **settings}
    made = transformers.Starcoder2Config(**given)
    made._attn_implementation = "eager"
    model = transformers.Starcoder2ForCausalLM(made)
    for number, layer in enumerate(model.model.layers):
        if number not in given["mlp_only_layers"]:
            layer.mlp = _Starcoder2Moe(made)
    return model


def write(
    folder: Path, raw: dict[str, Any], model: Any, fused: bool = False, **changes: Any
) -> Path:
    """A checkpoint folder of `model`: as published, or as transformers 5 holds it in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    if raw["model_type"] == "starcoder2_moe":
        save_file(_state(model), folder / "model.safetensors")
    else:
        model.save_pretrained(folder, save_original_format=not fused)
    written = raw
    if fused and raw["model_type"] != "starcoder2_moe":
        written = json.loads((folder / "config.json").read_text())  # as transformers 5 says it
    tiny.write_json(folder / "config.json", {**written, **changes})
    tiny.write_json(folder / "tokenizer.json", tiny.byte_tokenizer())
    end = "<|endoftext|>"
    tiny.write_json(folder / "tokenizer_config.json", {"eos_token": end, "bos_token": end})
    return folder


def _state(model: Any) -> dict[str, Tensor]:
    tied = model.config.tie_word_embeddings
    found = {n: t.clone() for n, t in model.state_dict().items()}
    return {n: t for n, t in found.items() if not (tied and n == "lm_head.weight")}


def logits(model: Any, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def decoded(loaded: LoadedModel, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits `[V]` after the last token of each text, computed as one step of all of them."""
    runner = Runner(loaded, 2 * len(texts))
    places = [runner.cache.place(64) for _ in texts]
    for place, ids in zip(places, texts, strict=True):
        runner.prefill(place, ids[:-1])
    return list(runner.decode(places, [ids[-1:] for ids in texts]))

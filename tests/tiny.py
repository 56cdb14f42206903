"""Tiny random StarCoder2 checkpoints, their transformers reference, and scripted models."""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from starquill.checkpoint.build import expected_tensors
from starquill.engine.loaded import LoadedModel
from starquill.loading import load
from starquill.models import architecture
from starquill.models.spec import StepBatch
from starquill.nn.cache import KvCache, blocks_for

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<fim_prefix>",
    "<fim_middle>",
    "<fim_suffix>",
    "<fim_pad>",
    "<repo_name>",
    "<file_sep>",
    "<issue_start>",
)
DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared"
NO_SHARED = "needs the fixtures of ../shared, which are not part of the repository"


def config(**changes: Any) -> dict[str, Any]:
    """The config of a 2-layer StarCoder2; a change to `...` removes the key."""
    base = {
        "model_type": "starcoder2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 320,
        "use_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "rope_theta": 1e5,
        "sliding_window": 8,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    merged = {**base, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def shapes(raw: dict[str, Any], head: bool = False) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint with this config."""
    spec = architecture(raw)
    found = expected_tensors(spec.Model(spec.read_config(raw)))
    if not head:
        del found["lm_head.weight"]
    return found


def weights(raw: dict[str, Any], head: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 tensors, biases and norms included: zeros and ones would hide faults."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes(raw, head).items():
        values = torch.randn(shape, generator=generator)
        is_norm = "norm" in name and name.endswith("weight")
        state[name] = 1 + 0.3 * values if is_norm else values * (0.3 if len(shape) == 1 else 0.15)
    return state


def byte_tokenizer(
    special: Sequence[str] = SPECIAL_TOKENS, vocab_size: int = 320
) -> dict[str, Any]:
    """A byte-level BPE definition: special tokens, the 256 bytes, merges, unused fillers."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "Ġ"), ("Ċ", "Ġ"), ("d", "e"), ("de", "f"), ("i", "m"), ("im", "p")]
    pieces = [*special, *alphabet, *("".join(pair) for pair in merges)]
    pieces += [f"unused{i}" for i in range(vocab_size - len(pieces))]
    pre_tokenizers = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, "special": True, **added} for i, text in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers},
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in merges],
        },
    }


def real_tokenizer_definition() -> dict[str, Any]:
    """StarCoder2's own vocabulary and merges."""
    packed = (DATA / "starcoder2-tokenizer.json.xz").read_bytes()
    definition: dict[str, Any] = json.loads(lzma.decompress(packed))
    return definition


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_checkpoint(
    folder: Path,
    raw: dict[str, Any] | None = None,
    state: dict[str, Tensor] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """A whole checkpoint folder; every part has a default that fits the others."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = config() if raw is None else raw
    write_json(folder / "config.json", raw)
    save_file(weights(raw) if state is None else state, folder / "model.safetensors")
    vocab_size = raw["vocab_size"] if isinstance(raw.get("vocab_size"), int) else 320
    if tokenizer is None and vocab_size >= 300:
        tokenizer = byte_tokenizer(vocab_size=vocab_size)
    if tokenizer is not None:
        write_json(folder / "tokenizer.json", tokenizer)
        end = "<|endoftext|>"
        write_json(folder / "tokenizer_config.json", {"eos_token": end, "bos_token": end})
    return folder


def random_ids(length: int, vocab_size: int = 320, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(1, vocab_size, length).tolist()


def our_logits(loaded: LoadedModel, ids: Sequence[int], chunk: int | None = None) -> Tensor:
    """Logits `[T, V]` at every position, computed in chunks through the cache."""
    cache = KvCache(loaded.config.cache_shape(), loaded.dtype, blocks_for(len(ids)))
    place = cache.place(len(ids))
    parts = []
    with torch.inference_mode():
        for start in range(0, len(ids), chunk or len(ids)):
            piece = torch.tensor([ids[start : start + (chunk or len(ids))]])
            batch = StepBatch.after(place, piece, cache)
            parts.append(loaded.model.logits(loaded.model.hidden(batch))[0])
            place.length += piece.shape[1]
    return torch.cat(parts)


def reference_model(raw: dict[str, Any], state: dict[str, Tensor]) -> Any:
    """The same model in transformers, float32, eager attention."""
    import transformers

    settings = {key: value for key, value in raw.items() if key != "model_type"}
    settings.setdefault("tie_word_embeddings", "lm_head.weight" not in state)
    reference_config = transformers.Starcoder2Config(**settings)
    reference_config._attn_implementation = "eager"
    model = transformers.Starcoder2ForCausalLM(reference_config).float().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    if "lm_head.weight" not in state:
        model.tie_weights()
    return model


def reference_logits(raw: dict[str, Any], state: dict[str, Tensor], ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return reference_model(raw, state)(torch.tensor([ids])).logits[0]


class ScriptedModel:
    """Stands in for a model: its likeliest token at output position n is `tokens[n]`.

    A token may be given as a list of ids to make likeliest in that order, so that tests can
    see what a filter or ban falls back to.
    """

    def __init__(self, tokens: Sequence[int | Sequence[int]], vocab_size: int, prompt: int) -> None:
        self.tokens, self.vocab_size, self.prompt = tokens, vocab_size, prompt

    def hidden(self, batch: StepBatch) -> Tensor:
        return batch.positions[..., None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.zeros(*hidden.shape[:-1], self.vocab_size)
        for row, position in enumerate(hidden[..., 0].flatten().tolist()):
            step = min(int(position) - self.prompt + 1, len(self.tokens) - 1)
            choice = self.tokens[step]
            for rank, token in enumerate([choice] if isinstance(choice, int) else choice):
                logits.view(-1, self.vocab_size)[row, token] = 30.0 - rank
        return logits


def scripted(
    loaded: LoadedModel, tokens: Sequence[int | Sequence[int]], prompt: int
) -> LoadedModel:
    """`loaded` with its weights replaced by a script that begins after `prompt` tokens."""
    model = ScriptedModel(tokens, loaded.config.vocab_size, prompt)
    return dataclasses.replace(loaded, model=model)


def cache_block_bytes(loaded: LoadedModel) -> int:
    """What a block of the cache takes."""
    return loaded.config.cache_shape().block_bytes(loaded.dtype)


def load_tiny(folder: Path, **changes: Any) -> LoadedModel:
    """Write a tiny checkpoint into `folder` and load it."""
    return load(write_checkpoint(folder, config(**changes)))

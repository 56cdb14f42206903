"""A tokenizer from a GGUF file's fields, as the definition that a `tokenizer.json` would hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starquill.errors import CheckpointError, UnsupportedError

_CONTROL, _USER_DEFINED = 3, 4
# llama.cpp's names for "digits one by one, then GPT-2's split", which StarCoder2 uses.
_DIGIT_RULES = ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone")
# Qwen2's: a contraction, a word with what stands before it, one digit, punctuation, white space.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_definition(
    fields: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What `tokenizer.json` and `tokenizer_config.json` would say, and warnings."""
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedError(f"the file's tokenizer is {kind!r} (implemented: gpt2)")
    tokens, merges = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise CheckpointError("the file's tokenizer has no tokens or no merges")
    rule = fields.get("tokenizer.ggml.pre")
    warnings = []
    splits, normalizer = [{"type": "Digits", "individual_digits": True}, _byte_level(False)], None
    if rule == "qwen2":
        pattern = {"type": "Split", "pattern": {"Regex": _QWEN2_SPLIT}, "behavior": "Isolated"}
        splits = [{**pattern, "invert": False}, {**_byte_level(False), "use_regex": False}]
        normalizer = {"type": "NFC"}
    elif rule not in _DIGIT_RULES:
        found = "does not say" if rule is None else f"says {rule!r}"
        warnings.append(
            f"the file {found} how text is split before merging: digits are split one by one, "
            "as StarCoder2 does"
        )
    definition = {
        "version": "1.0",
        "added_tokens": _added(tokens, fields.get("tokenizer.ggml.token_type") or []),
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "post_processor": None,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    return definition, _config(fields, tokens), warnings


def _byte_level(prefix: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": True,
        "use_regex": True,
    }


def _added(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": tokens[index], "special": kind == _CONTROL, **flags}
        for index, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _config(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"chat_template": fields.get("tokenizer.chat_template")}
    for name in ("bos", "eos"):
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            config[f"{name}_token"] = tokens[index]
    return config

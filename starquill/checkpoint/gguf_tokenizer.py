"""A tokenizer from a GGUF file's fields, as the definition that a `tokenizer.json` would hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starquill.errors import CheckpointError, UnsupportedError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"
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
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(f"the file's tokenizer is {kind!r} (implemented: gpt2, llama)")
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("the file's tokenizer has no tokens")
    warnings: list[str] = []
    made = _pieces(fields, tokens) if kind == "llama" else _bytes(fields, tokens, warnings)
    definition = {
        "version": "1.0",
        "added_tokens": _added(tokens, fields.get("tokenizer.ggml.token_type") or []),
        "pre_tokenizer": None,
        "post_processor": None,
        **made,
    }
    return definition, _config(fields, tokens), warnings


def _bytes(fields: Mapping[str, Any], tokens: list[str], warnings: list[str]) -> dict[str, Any]:
    """Of a byte-level tokenizer."""
    merges = fields.get("tokenizer.ggml.merges")
    if merges is None:
        raise CheckpointError("the file's tokenizer has no merges")
    rule = fields.get("tokenizer.ggml.pre")
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
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [merge.split(" ") for merge in merges]
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": _byte_level(True),
        "model": {"type": "BPE", "vocab": vocabulary, "merges": pairs},
    }


def _pieces(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Of a SentencePiece tokenizer, which merges what has the highest score first."""
    scores = fields.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"the file's tokenizer has {len(scores or ())} scores (expected {len(tokens)})"
        )
    prefixes = fields.get("tokenizer.ggml.add_space_prefix", True) is not False
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    own_space = [{"type": "Prepend", "prepend": _SPACE}] if prefixes else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixes else []
    undone = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders = [undone, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    known = isinstance(unknown, int) and 0 <= unknown < len(tokens)
    model = {
        "type": "BPE",
        "unk_token": tokens[unknown] if known else None,
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": _merges(tokens, scores, fields.get("tokenizer.ggml.token_type") or []),
    }
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*own_space, spaces]},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[list[str]]:
    """Every pair of pieces that make a piece; the best first, of equals the first in the file."""
    kinds = [*types, *[_NORMAL] * (len(tokens) - len(types))]
    parts = {t: i for i, t in enumerate(tokens) if kinds[i] in (_NORMAL, _USER_DEFINED)}
    found = []
    for token, index in parts.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in parts and right in parts:
                found.append((-scores[index], index, parts[left], parts[right], left, right))
    return [[left, right] for *_, left, right in sorted(found)]


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
        {"id": index, "content": tokens[index], "special": kind != _USER_DEFINED, **flags}
        for index, kind in enumerate(types)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _config(fields: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"chat_template": fields.get("tokenizer.chat_template")}
    # llama.cpp's own default for those of SentencePiece.
    starts = fields.get("tokenizer.ggml.add_bos_token", True if _is_llama(fields) else None)
    if isinstance(starts, bool):
        config["add_bos_token"] = starts
    for name in ("bos", "eos"):
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            config[f"{name}_token"] = tokens[index]
    return config


def _is_llama(fields: Mapping[str, Any]) -> bool:
    return fields.get("tokenizer.ggml.model") == "llama"

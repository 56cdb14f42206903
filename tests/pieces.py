"""SentencePiece-style tokenizers as Mixtral and Phi-3.5-MoE have them, trained on this code."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCABULARY = 640
# Phi's control tokens swallow the white space behind them.
PHI = ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
FORMS = ("mixtral", "mixtral, newer", "phi")
CHATS = {
    "mixtral": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] "
    "{{ m['content'] }} [/INST]{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}",
    "phi": "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "<|assistant|>\n",
}
TEXTS = (
    "def f(x):\n    return x + 1\n",
    "",
    " ",
    "  two spaces",
    "a",
    " a",
    "\n",
    "\n\n\tx",
    "tab\tand  double  spaces ",
    "naïve café ÀÉ",
    "日本語のコメント # こんにちは",
    "emoji 😀👩‍👩‍👧 done",
    "😀",
    "\x00\x01 control",
    "1234567 3.14 0xff",
    "trailing newline\n",
    "\r\n windows",
    "<0x41> is no byte here",
    "\u00a0no-break \u2028 line",
)


@functools.cache
def _trained() -> tuple[dict[str, int], list[list[str]]]:
    """Vocabulary and merges of a small BPE; what is rare is left to the byte tokens."""
    made = tokenizers.Tokenizer(models.BPE(unk_token=UNK, byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    first = [UNK, BOS, EOS, *BYTES]
    room = VOCABULARY - len(PHI)
    trainer = trainers.BpeTrainer(
        vocab_size=room, special_tokens=first, limit_alphabet=90, show_progress=False
    )
    root = Path(__file__).parent.parent / "starquill"
    lines = [line for path in sorted(root.rglob("*.py")) for line in path.open(encoding="utf-8")]
    made.train_from_iterator([line.rstrip("\n") for line in lines], trainer)
    model = json.loads(made.to_str())["model"]
    assert len(model["vocab"]) == room
    return model["vocab"], model["merges"]


def definition(form: str = "mixtral", extra: Sequence[str] = ()) -> dict[str, Any]:
    """A `tokenizer.json` with the sections of the published files; `extra` control tokens last."""
    vocabulary, merges = _trained()
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    newer = form == "mixtral, newer"
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    names = [UNK, BOS, EOS, *(PHI if form == "phi" else ()), *extra]
    ids = [*range(3), *range(len(vocabulary), len(vocabulary) + len(names) - 3)]
    flags = {"single_word": False, "lstrip": False, "normalized": False, "special": True}
    template = [{"SpecialToken": {"id": BOS, "type_id": 0}}] if form != "phi" else []
    single = [*template, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": name, "rstrip": name in (*PHI[1:], *extra), **flags}
            for i, name in zip(ids, names, strict=True)
        ],
        "normalizer": None if newer else {"type": "Sequence", "normalizers": [prepend, spaces]},
        "pre_tokenizer": metaspace if newer else None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [1], "tokens": [BOS]}} if template else {},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": UNK,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def settings(form: str = "mixtral") -> dict[str, Any]:
    """Its `tokenizer_config.json`."""
    phi = form == "phi"
    return {
        "bos_token": BOS,
        "eos_token": PHI[0] if phi else EOS,
        "unk_token": UNK,
        "add_bos_token": not phi,
        "chat_template": CHATS["phi" if phi else "mixtral"],
    }

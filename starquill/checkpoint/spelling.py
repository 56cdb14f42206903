"""What the names of a vocabulary's tokens spell: GPT-2's bytes, or SentencePiece's pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starquill.errors import UnsupportedError

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, by character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    return table | {chr(256 + i): b for i, b in enumerate(others)}


@dataclass(frozen=True)
class Spelling:
    """How a vocabulary's names spell text.

    With an `alphabet` each character stands for a byte (GPT-2). Without one, names are text in
    which spaces are U+2581, and a byte that no other token spells is `<0xNN>` (SentencePiece).
    `own_space` says that decoding leaves out one space at a text's start, which encoding put there.
    """

    alphabet: Mapping[str, int] | None
    own_space: bool

    def spelled(self, name: str) -> bytes:
        """The bytes of a token that is no added one."""
        if self.alphabet is not None:
            return bytes(self.alphabet[c] for c in name if c in self.alphabet)
        byte = _BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else self.added(name)

    def added(self, name: str) -> bytes:
        """The bytes of an added token that is no control token."""
        return (name if self.alphabet is not None else name.replace(_SPACE, " ")).encode()

    def unspellable(self, vocabulary: Mapping[str, int]) -> bytes:
        """Bytes without a token: StarCoder2's vocabulary lacks 0xf1, besides what is no UTF-8."""
        if self.alphabet is None:
            return b""  # `spelling` refused a vocabulary that lacks any
        return bytes(b for character, b in self.alphabet.items() if character not in vocabulary)


def spelling(definition: Mapping[str, Any], vocabulary: Mapping[str, int]) -> Spelling:
    """The spelling that the decoder of a `tokenizer.json` undoes.

    Raises UnsupportedError for one that is neither, or that cannot spell every text.
    """
    decoders = list(_parts(definition.get("decoder"), "decoders"))
    if any(part["type"] == "ByteLevel" for part in decoders):
        return Spelling(_byte_alphabet(), own_space=False)
    own_space = _pieces(decoders)
    if own_space is None:
        named = ", ".join(str(part["type"]) for part in decoders) or "none"
        raise UnsupportedError(
            f"tokenizer.json: the decoder is {named} (implemented: ByteLevel, or Replace, "
            "ByteFallback, Fuse and Strip as SentencePiece's models have them)"
        )
    lacking = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    if lacking:
        raise UnsupportedError(
            f"tokenizer.json: {len(lacking)} of the 256 byte tokens are missing (first "
            f"{lacking[0]}), so that not every text has tokens"
        )
    return Spelling(None, own_space)


def _pieces(decoders: list[Mapping[str, Any]]) -> bool | None:
    """Whether they strip a space at a text's start; None if they are not SentencePiece's."""
    *parts, last = decoders or [{"type": "none"}]
    strips = last["type"] == "Strip"
    if strips and (last.get("content"), last.get("start"), last.get("stop")) != (" ", 1, 0):
        return None
    kinds = [part["type"] for part in (parts if strips else decoders)]
    if kinds != ["Replace", "ByteFallback", "Fuse"]:
        return None
    replaced = decoders[0].get("pattern"), decoders[0].get("content")
    return strips if replaced == ({"String": _SPACE}, " ") else None


def _parts(section: object, within: str) -> Iterator[Mapping[str, Any]]:
    """A section of a `tokenizer.json`, or the parts of one that is a sequence."""
    if not isinstance(section, Mapping):
        return
    if section.get("type") == "Sequence":
        for part in section.get(within) or ():
            yield from _parts(part, within)
    else:
        yield section


def prefixes_pieces(definition: Mapping[str, Any]) -> bool:
    """Whether text behind a control token gets a space of its own too, not just a text's start."""
    normalizers = _parts(definition.get("normalizer"), "normalizers")
    splitters = _parts(definition.get("pre_tokenizer"), "pretokenizers")
    return any(part["type"] == "Prepend" for part in normalizers) or any(
        part["type"] == "Metaspace" and part.get("prepend_scheme", "always") == "always"
        for part in splitters
    )


def without_prefix(definition: Mapping[str, Any]) -> dict[str, Any]:
    """A definition by which text goes on inside another: it gets no space in front."""
    return {
        **definition,
        "normalizer": _kept(definition.get("normalizer"), "normalizers"),
        "pre_tokenizer": _kept(definition.get("pre_tokenizer"), "pretokenizers"),
    }


def _kept(section: Any, within: str) -> Any:
    if not isinstance(section, Mapping):
        return section
    kind = section.get("type")
    if kind == "Sequence":
        parts = [_kept(part, within) for part in section.get(within) or ()]
        return {**section, within: [part for part in parts if part is not None]}
    if kind == "Metaspace":
        kept = {name: value for name, value in section.items() if name != "add_prefix_space"}
        return {**kept, "prepend_scheme": "never"}
    return None if kind == "Prepend" else section


def start_tokens(definition: Mapping[str, Any]) -> tuple[str, ...]:
    """Control tokens that the post-processor writes in front of a text."""
    names: list[str] = []
    for part in _parts(definition.get("post_processor"), "processors"):
        if part["type"] != "TemplateProcessing":
            continue
        for piece in part.get("single") or ():
            if "SpecialToken" not in piece:
                break
            names.append(piece["SpecialToken"]["id"])
    return tuple(names)

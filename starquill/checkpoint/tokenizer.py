"""Text to ids and back: control tokens only where they are asked for, bytes never torn.

Wraps the `tokenizers` library. Two encoders are kept: one that reads special-token strings as
control tokens, and one to which all text is data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from starquill.checkpoint.files import read_checkpoint_text, read_json_if_there
from starquill.errors import BadRequestError, CheckpointError, UnsupportedError

# Bytes from which a text takes long enough that others should not wait for it.
_LONG_TEXT = 4096


@dataclass(frozen=True)
class FimTokens:
    """Ids of the fill-in-the-middle and repository tokens; the last two are optional."""

    prefix: int
    suffix: int
    middle: int
    file_sep: int | None
    repo_name: int | None
    pad: int | None

    @property
    def stops(self) -> frozenset[int]:
        """Any of them ends a middle: models often write `<file_sep>` instead of an end token."""
        ids = (self.prefix, self.suffix, self.middle, self.file_sep, self.repo_name, self.pad)
        return frozenset(i for i in ids if i is not None)


# StarCoder's spelling, SantaCoder's with hyphens, Qwen-Coder's. Every name must be one token.
_FIM_SPELLINGS = (
    {
        "prefix": "<fim_prefix>",
        "suffix": "<fim_suffix>",
        "middle": "<fim_middle>",
        "file_sep": "<file_sep>",
        "repo_name": "<repo_name>",
        "pad": "<fim_pad>",
    },
    {
        "prefix": "<fim-prefix>",
        "suffix": "<fim-suffix>",
        "middle": "<fim-middle>",
        "file_sep": "<file-sep>",
        "repo_name": "<repo-name>",
        "pad": "<fim-pad>",
    },
    {
        "prefix": "<|fim_prefix|>",
        "suffix": "<|fim_suffix|>",
        "middle": "<|fim_middle|>",
        "file_sep": "<|file_sep|>",
        "repo_name": "<|repo_name|>",
        "pad": "<|fim_pad|>",
    },
)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, by character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable}
    return table | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """A byte-level BPE tokenizer from `tokenizer.json`."""

    def __init__(self, definition: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        self.definition = definition
        self.config = config or {}
        added = definition.get("added_tokens") or []
        self.added: dict[int, str] = {token["id"]: token["content"] for token in added}
        self._control = tokenizers.Tokenizer.from_str(json.dumps(definition))
        self.special_ids: frozenset[int] = frozenset(
            token["id"]
            for token in added
            if token.get("special") or self._is_control(token["content"])
        )
        marked = [{**token, "special": token["id"] in self.special_ids} for token in added]
        as_data = {**definition, "added_tokens": marked}
        self._data = tokenizers.Tokenizer.from_str(json.dumps(as_data))
        self._data.encode_special_tokens = True  # that is: as text
        for encoder in (self._control, self._data):
            encoder.no_truncation()
            encoder.no_padding()
        if "ByteLevel" not in json.dumps(definition.get("decoder")):
            raise UnsupportedError("tokenizer.json: only byte-level decoders are implemented")

    def _is_control(self, text: str) -> bool:
        """Some tokenizers do not flag their control tokens as special."""
        named = {self.named_token(f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
        return text in named or any(text in names.values() for names in _FIM_SPELLINGS)

    @cached_property
    def id_bound(self) -> int:
        """One more than the highest id."""
        return max(self._control.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Ids of `text`, with no token added. Special-token strings are data unless asked.

        Raises BadRequestError for text with lone surrogates, which no bytes stand for (Python
        makes them of arguments that are not UTF-8), and for bytes that the vocabulary lacks.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRequestError(f"the text is not UTF-8 (character {error.start})") from None
        encoder = self._control if parse_special else self._data
        if len(data) < _LONG_TEXT:
            ids = list(encoder.encode(text, add_special_tokens=False).ids)
        else:  # only a batch lets other threads run meanwhile
            ids = list(encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        if len(data.translate(None, self._unspellable)) < len(data):
            self._check_spelled(text, ids)
        return ids

    @cached_property
    def most_bytes(self) -> int | None:
        """What one token of a text can stand for at most; None if that is not known."""
        if self.definition.get("normalizer") is not None:  # it may make a text shorter
            return None
        names = (len(name.encode()) for name in self.added.values())
        return max(*map(len, self.token_bytes), *names, 1)

    @cached_property
    def _unspellable(self) -> bytes:
        """Bytes without a token: StarCoder2's vocabulary lacks 0xf1, besides what is no UTF-8."""
        spelled = (self.id_of(character) is not None for character in _byte_alphabet())
        pairs = zip(_byte_alphabet().values(), spelled, strict=True)
        return bytes(byte for byte, known in pairs if not known)

    def _check_spelled(self, text: str, ids: list[int]) -> None:
        """Refuse `text` if the library left some of its bytes out of `ids`."""
        added = {i: len(content.encode()) for i, content in self.added.items()}
        spelled = sum(added.get(i, len(self.token_bytes[i])) for i in ids)
        if spelled == len(text.encode()):
            return
        for index, character in enumerate(text):
            for byte in character.encode():
                if byte in self._unspellable:
                    raise BadRequestError(
                        f"the model has no token for byte {byte:#04x} (character {index})"
                    )

    def id_of(self, token: str) -> int | None:
        return self._control.token_to_id(token)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes that each id stands for; empty for control tokens and unused ids."""
        alphabet = _byte_alphabet()
        table = [b""] * self.id_bound
        for text, index in self._control.get_vocab(with_added_tokens=True).items():
            if index in self.special_ids:
                continue
            if index in self.added:
                table[index] = text.encode()
            else:
                table[index] = bytes(alphabet[c] for c in text if c in alphabet)
        return table

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        table = self.token_bytes
        parts = []
        for i in ids:
            special = "" if skip_special or i not in self.special_ids else self.added[i]
            parts.append(special.encode() or (table[i] if i < len(table) else b""))
        return b"".join(parts).decode("utf-8", errors="replace")

    @cached_property
    def fim(self) -> FimTokens | None:
        """The model's fill-in-the-middle tokens, looked up by name; None if it has none."""
        for names in _FIM_SPELLINGS:
            ids = {part: self.id_of(name) for part, name in names.items()}
            if all(ids[part] is not None for part in ("prefix", "suffix", "middle")):
                return FimTokens(**ids)  # type: ignore[arg-type]
        return None

    def named_token(self, key: str) -> str | None:
        """A token that the tokenizer's config names: `eos_token`, `bos_token`..."""
        value = self.config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    @property
    def eos_id(self) -> int | None:
        name = self.named_token("eos_token")
        return None if name is None else self.id_of(name)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model's folder; None where there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    definition = read_json_if_there(path)
    config = read_json_if_there(folder / "tokenizer_config.json")
    special = read_json_if_there(folder / "special_tokens_map.json")
    template = folder / "chat_template.jinja"
    if template.exists():
        config = {**config, "chat_template": read_checkpoint_text(template)}
    try:
        return Tokenizer(definition, {**special, **config})
    except UnsupportedError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is not a tokenizer definition: {error}") from None

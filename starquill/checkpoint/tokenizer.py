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
from starquill.checkpoint.spelling import (
    prefixes_pieces,
    spelling,
    start_tokens,
    without_prefix,
)
from starquill.errors import BadRequestError, CheckpointError, UnsupportedError

# Bytes from which a text takes long enough that others should not wait for it.
_LONG_TEXT = 4096


@dataclass(frozen=True)
class FimTokens:
    """Ids of the fill-in-the-middle and repository tokens; the latter and `pad` are optional.

    `by_line` says how a repository is written: Qwen ends its name and each file with a newline,
    and has the path of the file to fill in front of the prefix token, not behind.
    """

    prefix: int
    suffix: int
    middle: int
    file_sep: int | None
    repo_name: int | None
    pad: int | None
    by_line: bool = False

    @property
    def stops(self) -> frozenset[int]:
        """Any of them ends a middle: models often write `<file_sep>` instead of an end token."""
        ids = (self.prefix, self.suffix, self.middle, self.file_sep, self.repo_name, self.pad)
        return frozenset(i for i in ids if i is not None)


# StarCoder's spelling, SantaCoder's with hyphens, Qwen-Coder's. Every name must be one token.
_QWENS = {
    "prefix": "<|fim_prefix|>",
    "suffix": "<|fim_suffix|>",
    "middle": "<|fim_middle|>",
    "file_sep": "<|file_sep|>",
    "repo_name": "<|repo_name|>",
    "pad": "<|fim_pad|>",
}
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
    _QWENS,
)


class Tokenizer:
    """A tokenizer from `tokenizer.json`: byte-level, or SentencePiece's with bytes to fall back on.

    The latter put a space in front of every text, which is no part of it: `own_space` says that
    decoding leaves one out at a text's start, `prefixes_pieces` that text behind a control token
    gets one too.
    """

    def __init__(self, definition: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        self.definition = definition
        self.config = config or {}
        added = definition.get("added_tokens") or []
        self.added: dict[int, str] = {token["id"]: token["content"] for token in added}
        self.special_ids: frozenset[int] = frozenset(
            token["id"]
            for token in added
            if token.get("special") or self._is_control(token["content"])
        )
        self._control, self._data = _encoders(definition, self.special_ids)
        self._spelling = spelling(definition, self._control.get_vocab(with_added_tokens=False))
        self.own_space = self._spelling.own_space
        self.prefixes_pieces = prefixes_pieces(definition)
        # Control tokens that swallow white space before or behind them.
        self.strips_left = _ids(added, "lstrip") & self.special_ids
        self.strips_right = _ids(added, "rstrip") & self.special_ids

    def _is_control(self, text: str) -> bool:
        """Some tokenizers do not flag their control tokens as special."""
        named = {self.named_token(f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
        return text in named or any(text in names.values() for names in _FIM_SPELLINGS)

    @cached_property
    def id_bound(self) -> int:
        """One more than the highest id."""
        return max(self._control.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, parse_special: bool = False, *, inside: bool = False) -> list[int]:
        """Ids of `text`, with no control token added. Such strings are data unless asked.

        Text `inside` another goes on after what is there: it gets no space of the tokenizer's own.
        Raises BadRequestError for text with lone surrogates, which no bytes stand for (Python
        makes them of arguments that are not UTF-8), and for bytes that the vocabulary lacks.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRequestError(f"the text is not UTF-8 (character {error.start})") from None
        control, as_data = self._inside if inside else (self._control, self._data)
        encoder = control if parse_special else as_data
        if len(data) < _LONG_TEXT:
            ids = list(encoder.encode(text, add_special_tokens=False).ids)
        else:  # only a batch lets other threads run meanwhile
            ids = list(encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        if len(data.translate(None, self._unspellable)) < len(data):
            self._check_spelled(text, ids)
        return ids

    @cached_property
    def _inside(self) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
        """The two encoders for text inside another."""
        shortened = without_prefix(self.definition)
        if shortened == self.definition:
            return self._control, self._data
        return _encoders(shortened, self.special_ids)

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """What stands in front of every text that the model was trained on, if anything does.

        `add_bos_token` of the config goes before the post-processor, as in transformers.
        """
        wanted = self.config.get("add_bos_token")
        names = start_tokens(self.definition)
        if isinstance(wanted, bool):
            bos = self.named_token("bos_token")
            names = (bos,) if wanted and bos is not None else ()
        ids = [self.id_of(name) for name in names]
        return tuple(i for i in ids if i is not None)

    def goes_on(self, before: Sequence[int]) -> bool:
        """Whether text behind the ids `before` gets no space of the tokenizer's own."""
        return bool(before) and not (self.prefixes_pieces and before[-1] in self.special_ids)

    def started(self, ids: Sequence[int]) -> list[int]:
        """`ids` behind the start tokens, unless these are there already."""
        begun = tuple(ids[: len(self.start_ids)]) == self.start_ids
        return list(ids) if begun else [*self.start_ids, *ids]

    @cached_property
    def most_bytes(self) -> int | None:
        """What one token of a text can stand for at most; None if that is not known."""
        if self._spelling.alphabet is None:
            shortens = bool(self.strips_left | self.strips_right)
        else:
            shortens = self.definition.get("normalizer") is not None
        if shortens:
            return None
        names = (len(name.encode()) for name in self.added.values())
        return max(*map(len, self.token_bytes), *names, 1)

    @cached_property
    def _unspellable(self) -> bytes:
        return self._spelling.unspellable(self._control.get_vocab(with_added_tokens=True))

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
        table = [b""] * self.id_bound
        for text, index in self._control.get_vocab(with_added_tokens=True).items():
            if index not in self.special_ids:
                spelled = self._spelling.added if index in self.added else self._spelling.spelled
                table[index] = spelled(text)
        return table

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text that `ids` are, without a space of the tokenizer's own at its start.

        Bytes that are no UTF-8 become U+FFFD.
        """
        data = self._joined(ids, skip_special)
        if self.own_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def piece(self, index: int) -> str:
        """What one token adds to a text; a control token's name."""
        return self._joined([index], skip_special=False).decode("utf-8", errors="replace")

    def _joined(self, ids: Sequence[int], skip_special: bool) -> bytes:
        table = self.token_bytes
        parts = []
        for i in ids:
            special = "" if skip_special or i not in self.special_ids else self.added[i]
            parts.append(special.encode() or (table[i] if i < len(table) else b""))
        return b"".join(parts)

    @cached_property
    def fim(self) -> FimTokens | None:
        """The model's fill-in-the-middle tokens, looked up by name; None if it has none."""
        for names in _FIM_SPELLINGS:
            ids = {part: self.id_of(name) for part, name in names.items()}
            if all(ids[part] is not None for part in ("prefix", "suffix", "middle")):
                return FimTokens(**ids, by_line=names is _QWENS)  # type: ignore[arg-type]
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


def _encoders(
    definition: dict[str, Any], special: frozenset[int]
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """One to which the strings of `special` are control tokens, and one to which all is data."""
    control = tokenizers.Tokenizer.from_str(json.dumps(definition))
    added = definition.get("added_tokens") or []
    marked = [{**token, "special": token["id"] in special} for token in added]
    data = tokenizers.Tokenizer.from_str(json.dumps({**definition, "added_tokens": marked}))
    data.encode_special_tokens = True  # that is: as text
    for encoder in (control, data):
        encoder.no_truncation()
        encoder.no_padding()
    return control, data


def _ids(added: Sequence[dict[str, Any]], flag: str) -> frozenset[int]:
    return frozenset(token["id"] for token in added if token.get(flag))


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

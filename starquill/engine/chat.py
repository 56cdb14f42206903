"""Chat templates: messages to ids, where only the template may write control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.errors import BadRequestError, CheckpointError

Message = Mapping[str, str]

# Put inside special-token strings that a message contains, so that they pass through the
# template as data; removed before encoding. Private-use characters, made longer until no
# message contains them.
_SHIELD, _LONGER = "\ue0f5", "\ue0f6"
ROLES = ("user", "assistant", "system", "tool", "developer")
# Headings that StarCoder2-Instruct writes when it goes on past its own answer.
_HEADINGS = ("### Instruction", "### Response")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """The first of `texts` that stands at a place; nothing for no texts."""
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _check_messages(messages: Sequence[Message]) -> None:
    """Refuse what is no conversation; a role could spell a control token, so roles are known."""
    for message in messages:
        if not isinstance(message, Mapping):
            raise BadRequestError(f"a message is {message!r:.60} (expected role and content)")
        if message.get("role", ROLES[0]) not in ROLES:
            raise BadRequestError(
                f"a message's role is {message['role']!r:.60} (expected {', '.join(ROLES)})"
            )
        for text in message.values():
            if not isinstance(text, str):
                raise BadRequestError(
                    f"message content is {type(text).__name__} (expected a string)"
                )


class ChatTemplate:
    """A model's own template, rendered in jinja2's sandbox."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.source = source
        self._tokenizer = tokenizer
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = lambda v, **kw: json.dumps(v, ensure_ascii=False, **kw)
        self._environment = environment
        names = [tokenizer.added[i] for i in tokenizer.special_ids]
        by_length = sorted(names, key=len, reverse=True)
        self._special = _any_of(by_length)
        # A message that ends in half a token must not grow together with the next one.
        halves = {name[:length] for name in names for length in range(1, len(name))}
        longest_first = sorted(halves, key=len, reverse=True)
        ending = rf"(?:{_any_of(longest_first).pattern})(?=\s*\Z)"
        self._breakable = re.compile(f"{self._special.pattern}|{ending}")

    @cached_property
    def _template(self) -> jinja2.Template:
        # Compiled at first use: a broken template must not keep a model from completing code.
        try:
            return self._environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the model's chat template is broken: {error}") from None

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer in this template's form, beside the end token."""
        return _HEADINGS if all(h in self.source for h in _HEADINGS) else ()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the conversation, ending where the model's answer begins.

        Special-token strings inside messages are data. Raises BadRequestError with the
        template's own words for a conversation that it refuses.
        """
        _check_messages(messages)
        texts = [text for message in messages for text in message.values()]
        shield = _SHIELD
        while any(shield in text for text in texts):
            shield += _LONGER
        shielded = [{k: self._shield(v, shield) for k, v in m.items()} for m in messages]
        variables: dict[str, Any] = {
            name: self._tokenizer.named_token(name) or "" for name in ("bos_token", "eos_token")
        }
        template = self._template
        try:
            text = template.render(messages=shielded, add_generation_prompt=True, **variables)
        except Exception as error:  # templates are programs, and may fail in any way
            raise BadRequestError(f"the chat template refuses this conversation: {error}") from None
        return self._encode_rendered(text, shield)

    def _shield(self, text: str, shield: str) -> str:
        return self._breakable.sub(lambda m: m[0][:1] + shield + m[0][1:], text)

    def _encode_rendered(self, text: str, shield: str) -> list[int]:
        tokenizer, ids = self._tokenizer, list[int]()
        end = 0
        for match in self._special.finditer(text):
            special = tokenizer.id_of(match[0])
            assert special is not None
            piece = text[end : match.start()]
            if special in tokenizer.strips_left:
                piece = piece.rstrip()
            ids += [*self._data(piece, ids, shield), special]
            end = match.end()
        return ids + self._data(text[end:], ids, shield)

    def _data(self, piece: str, before: Sequence[int], shield: str) -> list[int]:
        """Ids of the text between two control tokens, of which one may be the last of `before`."""
        tokenizer = self._tokenizer
        if before and before[-1] in tokenizer.strips_right:
            piece = piece.lstrip()
        return tokenizer.encode(piece.replace(shield, ""), inside=tokenizer.goes_on(before))


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template in the tokenizer's config: a string, or the one named default of several."""
    source = tokenizer.config.get("chat_template")
    if isinstance(source, list):
        templates = [t for t in source if isinstance(t, dict)]
        named = {t["name"]: t.get("template") for t in templates if isinstance(t.get("name"), str)}
        source = named.get("default") or next(iter(named.values()), None)
    return ChatTemplate(source, tokenizer) if isinstance(source, str) else None

"""`Sequence`: the state of one running request, from its logits to its deltas."""

from __future__ import annotations

from torch import Tensor

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.engine.grammar import Grammar, Ids
from starquill.engine.loaded import LoadedModel
from starquill.engine.params import check_params
from starquill.engine.sampling import Sampler, logprobs
from starquill.engine.stopping import TextStream
from starquill.errors import BadRequestError, CapacityError, listing
from starquill.types import Delta, FinishReason, GenerateRequest


def check_request(loaded: LoadedModel, request: GenerateRequest, context: int) -> None:
    """Refuse what cannot run: bad parameters, ids outside the vocabulary, too long a prompt."""
    vocab_size = loaded.config.vocab_size
    check_params(request.params, vocab_size)
    if not request.prompt_ids:
        raise BadRequestError("the prompt has no tokens")
    outside = [str(i) for i in request.prompt_ids if not 0 <= i < vocab_size]
    if outside:
        raise BadRequestError(
            f"the prompt has ids {listing(outside)} (the vocabulary is 0 to {vocab_size - 1})"
        )
    length = request.prompt_tokens
    if length >= context and request.params.max_tokens > 0:
        raise CapacityError(
            f"the prompt has {length} tokens; the context is {context}, of which at least one "
            "must be left to write"
        )
    if length > context and request.prompt_logprobs is not None:
        raise CapacityError(f"the prompt has {length} tokens; the context is {context}")


def has_own_space(tokenizer: Tokenizer | None, request: GenerateRequest) -> bool:
    """Whether a space at the output's beginning is the tokenizer's, put in front of every text.

    What a grammar asked for is text to the last space.
    """
    if tokenizer is None or not tokenizer.own_space or request.heal or request.grammar is not None:
        return False
    return request.begins_text or request.prompt_ids[-1] in tokenizer.special_ids


class Sequence:
    """One request while it runs: what it has written, and whether it is done.

    `span` is the length that it may reach within `context`.
    """

    def __init__(self, loaded: LoadedModel, request: GenerateRequest, context: int) -> None:
        self.request = request
        self.output_ids: list[int] = []
        # Tokens that only write the healed end of the prompt again: not the user's.
        self.respelled = 0
        self.finish_reason: FinishReason | None = None
        self.sampler = Sampler(request.params, request.prompt_ids)
        length = len(request.prompt_ids)
        # Instead of the token that was taken back, each byte of its text may be one.
        respelled = max(len(request.heal) - 1, 0)
        self.span = max(length, min(context, length + request.params.max_tokens + respelled))
        self._loaded = loaded
        self._tokenizer = loaded.tokenizer
        self._end_ids = loaded.end_ids | request.stop_ids
        self._unspelled = request.heal
        self._grammar: Grammar | None = None
        if request.grammar is not None:
            self._grammar = loaded.grammars.start(request.grammar, request.heal)
        self._text = TextStream(
            request.params.stop, len(request.heal), has_own_space(loaded.tokenizer, request)
        )
        self._context = context

    def accept(self, logits: Tensor) -> Delta:
        """Choose the next token from `logits` `[V]` and say what it adds."""
        token = self.sampler.choose(logits, self._allowed(), is_output=not self._unspelled)
        self.output_ids.append(token)
        wanted = self.request.params.logprobs
        scored = None if wanted is None else logprobs(logits, token, wanted)
        if token in self._end_ids:
            self.finish_reason = "stop"
            text = self._text.finish()
            return Delta(self.request.id, token, text, scored, self.finish_reason)
        if self._grammar is not None:
            self._grammar.accept(token)
        spelled = self._bytes_of(token)
        is_prompt = bool(self._unspelled) and len(spelled) <= len(self._unspelled)
        self.respelled += is_prompt
        self._unspelled = self._unspelled[len(spelled) :]
        text = self._text.push(spelled)
        if self._text.stopped:
            self.finish_reason = "stop"
        elif self._grammar is not None and self._grammar.is_done:
            self.finish_reason = "stop"
            text += self._text.finish()
        elif self._is_full():
            self.finish_reason = "length"
            text += self._text.finish()
        return Delta(self.request.id, token, text, scored, self.finish_reason, is_prompt=is_prompt)

    def finish(self, reason: FinishReason) -> Delta:
        """End now, with whatever text was withheld."""
        self.finish_reason = reason
        return Delta(self.request.id, None, self._text.finish(), None, reason)

    def _allowed(self) -> list[int] | Ids | None:
        healing = self._loaded.healing.allowed(self._unspelled) if self._unspelled else None
        if self._grammar is None:
            return healing
        return self._grammar.allowed(healing, self._end_ids)

    def _bytes_of(self, token: int) -> bytes:
        if self.request.show_special and self._tokenizer and token in self._tokenizer.special_ids:
            return self._tokenizer.added[token].encode()
        table = self._tokenizer.token_bytes if self._tokenizer else []
        return table[token] if token < len(table) else b""

    def _is_full(self) -> bool:
        length = len(self.request.prompt_ids) + len(self.output_ids)
        counted = len(self.output_ids) - self.respelled
        return counted >= self.request.params.max_tokens or length >= self._context

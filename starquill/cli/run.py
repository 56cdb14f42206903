"""Run one request for a verb: stream it, show it as asked, and report."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import Any

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.cli.options import ModelOptions, QuantizeOptions, ShowOptions
from starquill.cli.printing import Printer, SilentPrinter, choose_printer
from starquill.cli.progress import reading_bar
from starquill.engine.engine import Engine
from starquill.engine.generation import Generation
from starquill.engine.loaded import LoadedModel
from starquill.loading import load
from starquill.types import Delta, GenerateRequest, GenerationStats

INTERRUPTED = 130


@dataclass(frozen=True)
class Outcome:
    """What a request wrote, and how it ended."""

    text: str
    deltas: tuple[Delta, ...]
    stats: GenerationStats

    @property
    def finish_reason(self) -> str | None:
        return self.deltas[-1].finish_reason

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.finish_reason == "cancelled" else 0


def load_model(options: ModelOptions, quantize: QuantizeOptions) -> LoadedModel:
    with reading_bar("loading" if quantize.quant is None else "quantizing") as show:
        return load(
            options.model,
            dtype=options.dtype,  # type: ignore[arg-type]  # load checks it
            revision=options.revision,
            allow_padded_vocab=options.allow_padded_vocab,
            quant=quantize.chosen(),
            exact=options.exact,
            on_progress=show,
        )


def run(
    loaded: LoadedModel,
    request: GenerateRequest,
    show: ShowOptions,
    before: str,
    *,
    reader_may_leave: bool = False,
) -> Outcome:
    """Stream `request` to standard output. `before` is the code that the text continues.

    With `reader_may_leave` a closed pipe does not end the request.
    """
    reported = request.params.logprobs
    if show.colorize and reported is None:
        request = replace(request, params=replace(request.params, logprobs=0))
    printer = SilentPrinter() if show.json else choose_printer(show, before)
    generation = Engine(loaded).generate(request)
    deltas = _stream(generation, printer, reader_may_leave)
    outcome = Outcome("".join(d.text for d in deltas), tuple(deltas), generation.stats)
    if show.json:
        print(json.dumps(as_json(outcome, loaded.tokenizer), ensure_ascii=False))
    elif reported is not None:
        _print_logprobs(outcome, loaded.tokenizer)
    if show.stats and not show.json:
        print(describe_stats(outcome), file=sys.stderr)
    return outcome


def _stream(generation: Generation, printer: Printer, reader_may_leave: bool) -> list[Delta]:
    """All deltas; Ctrl-C keeps what was written and ends the request."""
    deltas: list[Delta] = []
    try:
        for delta in generation:
            deltas.append(delta)
            printer = _write(printer, delta, reader_may_leave)
    except KeyboardInterrupt:
        if last := generation.cancel():
            deltas.append(last)
            printer = _write(printer, last, reader_may_leave)
    printer.finish()
    return deltas


def _write(printer: Printer, delta: Delta, reader_may_leave: bool) -> Printer:
    """Show `delta`; returns the printer to go on with."""
    try:
        printer.write(delta)
    except BrokenPipeError:
        if not reader_may_leave:
            raise
        return SilentPrinter()
    return printer


def _token_text(tokenizer: Tokenizer | None, token: int) -> str:
    return tokenizer.decode([token], skip_special=False) if tokenizer else f"<{token}>"


def as_json(outcome: Outcome, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The object that `--json` prints."""
    stats = outcome.stats
    tokens = []
    for delta in outcome.deltas:
        if delta.token_id is None or delta.is_prompt:
            continue
        token: dict[str, Any] = {
            "id": delta.token_id,
            "text": _token_text(tokenizer, delta.token_id),
        }
        if delta.logprobs is not None:
            token["logprob"] = delta.logprobs.chosen
            token["top"] = [
                {"id": t.token_id, "text": _token_text(tokenizer, t.token_id), "logprob": t.logprob}
                for t in delta.logprobs.top
            ]
        tokens.append(token)
    return {
        "text": outcome.text,
        "finish_reason": outcome.finish_reason,
        "tokens": tokens,
        "stats": {
            "prompt_tokens": stats.prompt_tokens,
            "generated_tokens": stats.generated_tokens,
            "prompt_tokens_per_second": round(stats.prompt_rate, 2),
            "generation_tokens_per_second": round(stats.generation_rate, 2),
            "time_to_first_token_seconds": round(stats.time_to_first_token, 4),
            "peak_memory_bytes": stats.peak_memory_bytes,
            "seed": stats.seed,
        },
    }


def describe_stats(outcome: Outcome) -> str:
    stats = outcome.stats
    seed = "" if stats.seed is None else f"\nseed:        {stats.seed}"
    peak = stats.peak_memory_bytes
    memory = "not known" if peak is None else f"{peak / 1e9:.2f} GB"
    return (
        f"prompt:      {stats.prompt_tokens} tokens, {stats.prompt_rate:.1f} tok/s\n"
        f"generation:  {stats.generated_tokens} tokens, {stats.generation_rate:.1f} tok/s "
        f"({outcome.finish_reason})\n"
        f"first token: after {stats.time_to_first_token:.3f} s\n"
        f"peak memory: {memory}{seed}"
    )


def _print_logprobs(outcome: Outcome, tokenizer: Tokenizer | None) -> None:
    for delta in outcome.deltas:
        if delta.token_id is None or delta.logprobs is None or delta.is_prompt:
            continue
        others = "  ".join(
            f"{_token_text(tokenizer, t.token_id)!r} {t.logprob:.3f}" for t in delta.logprobs.top
        )
        chosen = f"{_token_text(tokenizer, delta.token_id)!r} {delta.logprobs.chosen:.3f}"
        print(f"{chosen:<24} {others}".rstrip(), file=sys.stderr)

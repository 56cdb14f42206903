"""Run one request for a verb: stream it, show it as asked, and report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starquill.adapters.store import AdapterLimits
from starquill.checkpoint.tokenizer import Tokenizer
from starquill.cli.options import ModelOptions, QuantizeOptions, ShowOptions, XLoraOptions
from starquill.cli.printing import Printer, SilentPrinter, choose_printer
from starquill.cli.progress import reading_bar
from starquill.engine.engine import Engine
from starquill.engine.generation import Generation
from starquill.engine.loaded import LoadedModel
from starquill.errors import printable
from starquill.loading import load
from starquill.placement.stages import StageOf
from starquill.types import Delta, GenerateRequest, GenerationStats

INTERRUPTED = 130
_HEIGHTS = "·▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Outcome:
    """What a request wrote, and how it ended.

    `experts` are the adapters of an X-LoRA, `scalings` how strongly they wrote each token of
    `deltas`, `[T, K]`, the mean over the layers.
    """

    text: str
    deltas: tuple[Delta, ...]
    stats: GenerationStats
    experts: tuple[str, ...] = ()
    scalings: tuple[tuple[float, ...], ...] = ()

    @property
    def finish_reason(self) -> str | None:
        return self.deltas[-1].finish_reason

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.finish_reason == "cancelled" else 0


def load_model(
    options: ModelOptions,
    quantize: QuantizeOptions,
    xlora: XLoraOptions = XLoraOptions(),
    stage: StageOf | None = None,
) -> LoadedModel:
    with reading_bar("loading" if quantize.quant is None else "quantizing") as show:
        return load(
            options.model,
            dtype=options.dtype,  # type: ignore[arg-type]  # load checks it
            revision=options.revision,
            allow_padded_vocab=options.allow_padded_vocab,
            quant=quantize.chosen(),
            exact=options.exact,
            xlora=xlora.xlora,
            xlora_freeze=xlora.xlora_freeze,
            device_map=options.device_map,
            max_memory=options.max_memory,
            max_seq_len=options.max_seq_len,
            max_batch_size=options.max_batch_size,
            topology=quantize.topology,
            stage=stage,
            on_progress=show,
        )


def load_adapters(loaded: LoadedModel, chosen: Mapping[str, float]) -> Mapping[str, float]:
    """Load adapters by their paths, which become their aliases."""
    # Limits are for those whom a server lets in.
    unlimited = AdapterLimits(len(chosen) + 1, sys.maxsize, sys.maxsize)
    for path in chosen:
        loaded.adapters.limits = unlimited
        loaded.adapters.load(path, path)
    return chosen


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
    outcome = _outcome(loaded, generation, deltas)
    if show.json:
        print(json.dumps(as_json(outcome, loaded.tokenizer), ensure_ascii=False))
    elif reported is not None:
        _print_logprobs(outcome, loaded.tokenizer)
    if show.stats and not show.json:
        print(describe_stats(outcome), file=sys.stderr)
    if show.show_scalings:
        _print_scalings(outcome, loaded.tokenizer)
    return outcome


def _outcome(loaded: LoadedModel, generation: Generation, deltas: list[Delta]) -> Outcome:
    text, found = "".join(d.text for d in deltas), generation.scalings
    if loaded.xlora is None or found is None:
        return Outcome(text, tuple(deltas), generation.stats)
    # What the prompt's last token was read with wrote the first token, and so on.
    means = found[len(generation.request.prompt_ids) - 1 :].mean(1).tolist()
    scalings = tuple(tuple(row) for row in means)
    return Outcome(text, tuple(deltas), generation.stats, loaded.xlora.names, scalings)


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


def _written(outcome: Outcome) -> Iterator[tuple[int, Delta, tuple[float, ...]]]:
    """Each token of the output, its delta, and how strongly which adapter wrote it."""
    scalings = iter(outcome.scalings)
    for delta in outcome.deltas:
        if delta.token_id is not None:
            acted = next(scalings, ())
            if not delta.is_prompt:
                yield delta.token_id, delta, acted


def _token_text(tokenizer: Tokenizer | None, token: int) -> str:
    return tokenizer.piece(token) if tokenizer else f"<{token}>"


def as_json(outcome: Outcome, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The object that `--json` prints."""
    stats = outcome.stats
    tokens = []
    for token_id, delta, scalings in _written(outcome):
        token: dict[str, Any] = {"id": token_id, "text": _token_text(tokenizer, token_id)}
        if delta.logprobs is not None:
            token["logprob"] = delta.logprobs.chosen
            token["top"] = [
                {"id": t.token_id, "text": _token_text(tokenizer, t.token_id), "logprob": t.logprob}
                for t in delta.logprobs.top
            ]
        if scalings:
            values = (round(value, 4) for value in scalings)
            token["adapters"] = dict(zip(outcome.experts, values, strict=True))
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


def _print_scalings(outcome: Outcome, tokenizer: Tokenizer | None) -> None:
    """A line for each token: a bar for each adapter, and the one that acted most."""
    for token_id, _, scalings in _written(outcome):
        if not scalings:
            continue
        most = max(scalings)
        name = printable(outcome.experts[scalings.index(most)])
        text = repr(_token_text(tokenizer, token_id))
        print(f"{text:<16} {_bars(scalings)} {name} {most:.2f}", file=sys.stderr)


def _bars(values: tuple[float, ...]) -> str:
    """Heights from 0 to 1; what is past them, as scalings without softmax may be, is cut."""
    return "".join(_HEIGHTS[round(min(max(value, 0.0), 1.0) * 8)] for value in values)

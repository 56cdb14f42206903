"""`starquill eval perplexity`: the instrument by which quantization is judged."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from starquill.checkpoint.files import read_texts
from starquill.cli.options import AdapterOptions, ModelOptions, QuantizeOptions, expand_options
from starquill.errors import BadRequestError

if TYPE_CHECKING:
    from starquill.engine.scoring import Score

app = typer.Typer(help="Measure a model.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Without this, typer would make the only verb the command itself."""


@app.command()
@expand_options
def perplexity(
    data: Annotated[Path, typer.Option(help="A text file, or a folder of them.")],
    suffix: Annotated[str, typer.Option(help="Which files of a folder.")] = ".py",
    against: Annotated[
        str | None, typer.Option(help="A reference model to compare distributions with.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: ModelOptions = ModelOptions(),
    quantize: QuantizeOptions = QuantizeOptions(),
    adapters: AdapterOptions = AdapterOptions(),
) -> int:
    """Bits per byte and perplexity on text, and the distance to a reference model."""
    texts, acting = read_texts(data, suffix), adapters.chosen()
    from starquill.cli.run import load_adapters, load_model
    from starquill.engine.scoring import score_texts
    from starquill.loading import load

    if not any(texts):
        raise BadRequestError(f"{data} holds no text")
    reference = None if against is None else load(against)
    loaded = load_model(model, quantize)
    score = score_texts(loaded, texts, reference, load_adapters(loaded, acting))
    print(jsonlib.dumps(_as_json(score)) if json else _as_text(score))
    return 0


def _as_json(score: Score) -> dict[str, float]:
    result = {
        "tokens": score.tokens,
        "bytes": score.bytes,
        "bits_per_byte": score.bits_per_byte,
        "perplexity": score.perplexity,
    }
    if score.compared:
        result["kl_divergence"] = score.kl_divergence
        result["top_agreement"] = score.top_agreement
    return result


def _as_text(score: Score) -> str:
    text = (
        f"{score.tokens} tokens, {score.bytes} bytes\n"
        f"bits per byte: {score.bits_per_byte:.4f}\n"
        f"perplexity:    {score.perplexity:.4f}"
    )
    if score.compared:
        text += (
            f"\nKL divergence: {score.kl_divergence:.5f} nats a token\n"
            f"same top token: {100 * score.top_agreement:.2f} %"
        )
    return text

"""`starquill generate`: complete code at the end of a prompt."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from starquill.cli.options import (
    AdapterOptions,
    GrammarOptions,
    ModelOptions,
    QuantizeOptions,
    SamplingOptions,
    ShowOptions,
    XLoraOptions,
    expand_options,
)
from starquill.errors import BadRequestError


def read_prompt(prompt: str | None) -> str:
    """The prompt itself, or standard input for `-`, exactly as it is."""
    if prompt is None:
        raise BadRequestError("no prompt: give --prompt TEXT, or --prompt - for standard input")
    if prompt != "-":
        return prompt
    if sys.stdin is None:
        raise BadRequestError("standard input is closed; give --prompt TEXT")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(
            f"standard input is not UTF-8 (byte {error.start}); convert it first"
        ) from None


@expand_options
def generate(
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to complete; - reads standard input.")
    ] = None,
    heal: Annotated[
        bool, typer.Option("--heal/--no-heal", help="Let the prompt's last token be rewritten.")
    ] = True,
    parse_special: Annotated[
        bool,
        typer.Option(
            "--parse-special/--no-parse-special",
            help="Read special-token text in the prompt as control tokens.",
        ),
    ] = True,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt in the model's chat template.")
    ] = False,
    model: ModelOptions = ModelOptions(),
    quantize: QuantizeOptions = QuantizeOptions(),
    xlora: XLoraOptions = XLoraOptions(),
    adapters: AdapterOptions = AdapterOptions(),
    sampling: SamplingOptions = SamplingOptions(),
    constraint: GrammarOptions = GrammarOptions(),
    show: ShowOptions = ShowOptions(),
) -> int:
    """Complete code at the end of a prompt, streaming it as it is written."""
    params = sampling.params()
    show.check()
    xlora.check(show)
    text = read_prompt(prompt)
    grammar, acting = constraint.chosen(), adapters.chosen()
    # torch takes a second to import; mistakes in options are told before that.
    from starquill.cli.run import load_adapters, load_model, run
    from starquill.engine.prompts import chat_request, plain_request

    loaded = load_model(model, quantize, xlora)
    if chat:
        request = chat_request(loaded, [{"role": "user", "content": text}], params)
    else:
        request = plain_request(loaded, text, params, heal=heal, parse_special=parse_special)
    request = replace(request, grammar=grammar, adapter=load_adapters(loaded, acting))
    return run(loaded, request, show, before="" if chat else text).exit_code

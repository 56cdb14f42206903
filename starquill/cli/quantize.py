"""`starquill quantize`: write a quantized copy of a model that loads in a moment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from starquill.cli.options import QuantizeOptions, expand_options

DEFAULT_SCHEME = "4"


@expand_options
def quantize(
    model: Annotated[str, typer.Argument(help="A folder, a file or a hub id.")],
    out: Annotated[Path, typer.Option(help="The new folder; must not exist.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model.")
    ] = None,
    options: QuantizeOptions = QuantizeOptions(),
) -> int:
    """Quantize a model into a folder, in MLX's layout."""
    from starquill.cli.progress import reading_bar
    from starquill.quantizing import quantize_checkpoint

    chosen = replace(options, quant=options.quant or DEFAULT_SCHEME).chosen()
    assert chosen is not None
    with reading_bar("quantizing") as show:
        result = quantize_checkpoint(model, out, chosen, revision=revision, on_progress=show)
    print(f"{out}: {result.bytes_written:,} bytes from {result.bytes_read:,}")
    return 0

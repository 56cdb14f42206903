"""`starquill merge`: write a model with adapters in its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from starquill.cli.options import AdapterOptions, QuantizeOptions, expand_options
from starquill.errors import BadRequestError


@expand_options
def merge(
    model: Annotated[str, typer.Argument(help="A folder, a file, a hub id, or `default`.")],
    out: Annotated[Path, typer.Option(help="The new folder; must not exist.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help="Of merged weights: auto (as stored), float32, bfloat16 or float16."),
    ] = "auto",
    adapters: AdapterOptions = AdapterOptions(),
    quantize: QuantizeOptions = QuantizeOptions(),
) -> int:
    """Merge adapters into a model's weights and write it to a folder.

    Merged weights of a quantized model are written dense, unless --quant quantizes them again.
    """
    chosen = adapters.chosen()
    if not chosen:
        raise BadRequestError("there is nothing to merge: give --adapter PATH[=WEIGHT]")
    from starquill.cli.progress import reading_bar
    from starquill.merging import MergeOptions, merge_checkpoint

    options = MergeOptions(dtype, quantize.chosen())
    with reading_bar("merging") as show:
        result = merge_checkpoint(model, chosen, out, options, revision=revision, on_progress=show)
    print(f"{out}: {result.bytes_written:,} bytes from {result.bytes_read:,}")
    return 0

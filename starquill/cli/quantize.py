"""`starquill quantize`: write a quantized copy of a model that loads in a moment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from starquill.cli.options import QuantizeOptions, expand_options
from starquill.errors import BadRequestError

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

    if options.quant is None:
        if _experts_only(options):
            raise BadRequestError("experts alone need --quant, the bits that they get")
        options = replace(options, quant=DEFAULT_SCHEME)
    chosen = options.chosen()
    assert chosen is not None
    with reading_bar("quantizing") as show:
        result = quantize_checkpoint(model, out, chosen, revision=revision, on_progress=show)
    print(f"{out}: {result.bytes_written:,} bytes from {result.bytes_read:,}")
    return 0


def _experts_only(options: QuantizeOptions) -> bool:
    """Then the bits are the point, and nobody else's to choose."""
    from starquill.checkpoint.files import read_text
    from starquill.placement.topology import read_organization

    if options.organization is not None or options.topology is None:
        return options.organization == "moqe"
    return read_organization(read_text(options.topology), str(options.topology)) == "moqe"

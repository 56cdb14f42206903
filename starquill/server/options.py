"""What a server is told when it starts. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ServerOptions:
    """`name` is the model's in answers; requests may also name it by one of `aliases`. Without
    `api_key` everyone may ask. `cors` origins may call from a browser; none by default. A body
    may have `most_body_bytes`. `fim_order` is that of fills which do not ask for one. Where `hosts`
    is given, the address is a loopback one: requests must name it so, or by one of these. Adapters
    may be loaded and unloaded by requests where there is a `lora_root`, from below it alone.
    """

    name: str
    api_key: str | None = None
    cors: tuple[str, ...] = ()
    most_body_bytes: int = 16 << 20
    fim_order: Literal["psm", "spm"] = "psm"
    aliases: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    lora_root: Path | None = None

"""How much memory there is, so that a model that cannot fit is refused before it is read."""

from __future__ import annotations

import re
from pathlib import Path

from starquill.errors import CapacityError


def available_memory() -> int | None:
    """Bytes that can be taken without swapping; None where the system does not say."""
    try:
        told = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s*(\d+) kB", told, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def check_memory(needed: int, quantizing: bool) -> None:
    """Raise CapacityError if loading takes `needed` bytes at its peak and there are fewer."""
    available = available_memory()
    if available is not None and needed > available:
        advice = "fewer bits" if quantizing else "--quant 4, --dtype bfloat16 (half as much)"
        raise CapacityError(
            f"loading needs {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB of memory are "
            f"free; use {advice} or a smaller model"
        )

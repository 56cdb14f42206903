"""`open_adapter`: whichever kind of adapter a folder holds."""

from __future__ import annotations

from pathlib import Path

from starquill.adapters.adapter import (
    CONFIG,
    MLX_FILE,
    PEFT_FILE,
    Adapter,
    BaseModules,
    read_config,
)
from starquill.adapters.mlx import read_mlx
from starquill.adapters.peft import read_peft
from starquill.errors import AdapterError


def open_adapter(folder: str | Path, base: BaseModules) -> Adapter:
    """Read the adapter in `folder`, and hold all of it against the model that it is for.

    Raises AdapterError with all that does not fit, or UnsupportedError.
    """
    folder = Path(folder)
    raw = read_config(folder)
    if "peft_type" in raw:
        return read_peft(folder, raw, base)
    if "lora_parameters" in raw or "fine_tune_type" in raw:
        return read_mlx(folder, raw, base)
    raise AdapterError(
        f"{folder / CONFIG} is neither PEFT's (with peft_type, beside {PEFT_FILE}) nor MLX's (with "
        f"lora_parameters, beside {MLX_FILE})"
    )


def weight_bytes(folder: str | Path) -> int:
    """What a folder's adapter takes, from its files' sizes; 0 where it has none."""
    paths = (Path(folder) / name for name in (PEFT_FILE, MLX_FILE))
    return sum(path.stat().st_size for path in paths if path.exists())

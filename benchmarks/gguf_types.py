"""Every matrix of a GGUF file in one of llama.cpp's types, with or without importances.

    python benchmarks/gguf_types.py --source FILE --out DIR --types Q4_K Q3_K [--squares FILE]

Needs `llama-cpp-python` and nothing of starquill. `--squares` is a `.npz` of the mean squares of
each matrix's inputs, by GGUF's names: what llama.cpp calls an importance matrix.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

# The file types whose name has a size: `pure` then gives every matrix the same type.
_SIZED = ("Q3_K", "Q4_K", "Q5_K")
# Kept here, because llama.cpp goes on calling it.
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


def importances(path: Path) -> tuple[Any, list[Any]]:
    """llama.cpp's array of them, ended by an entry without a name; and what it points to."""
    squares = {name: np.ascontiguousarray(x, np.float32) for name, x in np.load(path).items()}
    entries = (llama_cpp.llama_model_imatrix_data * (len(squares) + 1))()
    keep: list[Any] = [squares]
    for entry, (name, values) in zip(entries, squares.items(), strict=False):
        entry.name, entry.size = name.encode(), len(values)
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return entries, keep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--types", nargs="+", required=True)
    parser.add_argument("--squares", type=Path)
    options = parser.parse_args()
    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
    for name in options.types:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}{'_S' * (name in _SIZED)}")
        params.nthread, params.pure = 1, True
        keep: Any = None
        if options.squares is not None:
            entries, keep = importances(options.squares)
            params.imatrix = ctypes.cast(
                entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data)
            )
        target = options.out / f"{name}.gguf"
        source = str(options.source).encode()
        if llama_cpp.llama_model_quantize(source, str(target).encode(), ctypes.byref(params)):
            raise SystemExit(f"llama.cpp could not quantize {options.source} to {name}")
        del keep


if __name__ == "__main__":
    main()

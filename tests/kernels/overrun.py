"""Reads past a buffer's end on purpose: `scripts/sanitize` wants to see it found.

Without an argument prints where the native module came from and, in a line, its instruction sets;
with one of those as argument, has it multiply vectors that are said to be longer than they are.
"""

from __future__ import annotations

import array
import sys

from starquill.kernels import _native

CLAIMED, REAL = 128, 64


def overrun(level: str) -> None:
    _native.select_isa(level)
    weight = array.array("H", bytes(2 * CLAIMED))
    x, out = array.array("f", bytes(4 * REAL)), array.array("f", bytes(4))
    addresses = [weight.buffer_info()[0], x.buffer_info()[0], 0, out.buffer_info()[0]]
    _native.dense_matmul_at(addresses, [1, CLAIMED, 1], True, 1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        overrun(sys.argv[1])
    else:
        print(_native.__file__)
        print(*_native.isa_levels())

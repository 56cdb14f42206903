"""GGUF: a whole model in one file. Blocks become grouped affine weights, integer for integer.

Files are read with the `gguf` package; block layouts are those of llama.cpp's `ggml-common.h`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starquill.checkpoint.source import TensorInfo
from starquill.errors import CheckpointError, UnsupportedError, listing
from starquill.models.spec import GgufNames
from starquill.quant.affine import AffineWeight, pack

Bytes = NDArray[Any]  # uint8; numpy types shifts of it as wider
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Blocks:
    """Decoded blocks: integers `[N, block]`, scale and bias `[N, groups]` float32."""

    q: Bytes
    scale: Floats
    bias: Floats


def _halves(blocks: Bytes, at: int, count: int = 1) -> Floats:
    """`count` float16 at byte `at` of each block, `[N, count]`."""
    return blocks[:, at : at + 2 * count].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high nibbles: `[N, n] -> [N, 2n]`."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _high_bits(packed: Bytes) -> Bytes:
    """32 bits of 4 bytes, least significant first, `[N, 32]`."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _q4_0(b: Bytes) -> Blocks:
    d = _halves(b, 0)
    return Blocks(_nibbles(b[:, 2:18]), d, -8 * d)


def _q4_1(b: Bytes) -> Blocks:
    return Blocks(_nibbles(b[:, 4:20]), _halves(b, 0), _halves(b, 2))


def _q5_0(b: Bytes) -> Blocks:
    d = _halves(b, 0)
    return Blocks(_nibbles(b[:, 6:22]) | _high_bits(b[:, 2:6]) << 4, d, -16 * d)


def _q5_1(b: Bytes) -> Blocks:
    q = _nibbles(b[:, 8:24]) | _high_bits(b[:, 4:8]) << 4
    return Blocks(q, _halves(b, 0), _halves(b, 2))


def _q8_0(b: Bytes) -> Blocks:
    d = _halves(b, 0)
    return Blocks(b[:, 2:34] ^ 0x80, d, -128 * d)  # two's complement to offset binary


# The 16 values that IQ4_NL's nibbles stand for.
_IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int16
)


def _iq4_nl(b: Bytes) -> Blocks:
    d = _halves(b, 0)
    values = (_IQ4_NL + 128).astype(np.uint8)
    return Blocks(values[_nibbles(b[:, 2:18])], d, -128 * d)


def _two_bit(packed: Bytes) -> Bytes:
    """2-bit values of K-quants: in each half, bits 2s of byte l are value 32·s + l."""
    halves = packed.reshape(len(packed), 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return ((halves >> shifts) & 3).reshape(len(packed), 256)


def _q2_k(b: Bytes) -> Blocks:
    scales = b[:, :16]
    d, dmin = _halves(b, 80), _halves(b, 82)
    return Blocks(_two_bit(b[:, 16:80]), d * (scales & 15), -(dmin * (scales >> 4)))


def _q3_k(b: Bytes) -> Blocks:
    high = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [N, 8, 32]
    q = _two_bit(b[:, 32:96]) | (high.reshape(len(b), 256) << 2)
    packed, top = b[:, 96:104], b[:, 104:108]
    low = _nibbles(packed)  # [N, 16]
    two = (top[:, None, :] >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]) & 3
    scales = (low | two.reshape(len(b), 16) << 4).astype(np.int16) - 32
    scale = _halves(b, 108) * scales.astype(np.float32)
    return Blocks(q, scale, -4 * scale)


def _k_scales(b: Bytes) -> tuple[Floats, Floats]:
    """Scale and bias `[N, 8]` of Q4_K and Q5_K: 6-bit integers, packed in 12 bytes."""
    packed = b[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=1)
    least = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=1)
    return _halves(b, 0) * scale, -(_halves(b, 2) * least)


def _four_bit(packed: Bytes) -> Bytes:
    """4-bit values of Q4_K and Q5_K: each 32 bytes hold two runs of 32 values."""
    chunks = packed.reshape(len(packed), 4, 1, 32)
    shifts = np.array([0, 4], dtype=np.uint8)[:, None]
    return ((chunks >> shifts) & 15).reshape(len(packed), 256)


def _q4_k(b: Bytes) -> Blocks:
    return Blocks(_four_bit(b[:, 16:]), *_k_scales(b))


def _q5_k(b: Bytes) -> Blocks:
    high = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [N, 8, 32]
    return Blocks(_four_bit(b[:, 48:]) | high.reshape(len(b), 256) << 4, *_k_scales(b))


def _q6_k(b: Bytes) -> Blocks:
    low = b[:, :128].reshape(len(b), 2, 1, 64) >> np.array([0, 4], dtype=np.uint8)[:, None] & 15
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (b[:, 128:192].reshape(len(b), 2, 1, 32) >> shifts) & 3
    q = low.reshape(len(b), 256) | high.reshape(len(b), 256) << 4
    scale = _halves(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    return Blocks(q, scale, -32 * scale)


@dataclass(frozen=True)
class BlockType:
    """One of llama.cpp's block formats, and the scheme its integers fit exactly."""

    bits: int
    group: int
    decode: Callable[[Bytes], Blocks]


Q = gguf.GGMLQuantizationType
BLOCK_TYPES: dict[Any, BlockType] = {
    Q.Q4_0: BlockType(4, 32, _q4_0),
    Q.Q4_1: BlockType(4, 32, _q4_1),
    Q.Q5_0: BlockType(5, 32, _q5_0),
    Q.Q5_1: BlockType(5, 32, _q5_1),
    Q.Q8_0: BlockType(8, 32, _q8_0),
    Q.IQ4_NL: BlockType(8, 32, _iq4_nl),
    Q.Q2_K: BlockType(2, 16, _q2_k),
    Q.Q3_K: BlockType(3, 16, _q3_k),
    Q.Q4_K: BlockType(4, 32, _q4_k),
    Q.Q5_K: BlockType(5, 32, _q5_k),
    Q.Q6_K: BlockType(6, 16, _q6_k),
}
DENSE_TYPES = {Q.F32: "F32", Q.F16: "F16", Q.BF16: "BF16"}


def affine(kind: Any, data: Bytes) -> AffineWeight:
    """Blocks `[out, bytes]` of one tensor as a weight `[out, in]` with the same integers."""
    block = BLOCK_TYPES[kind]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    rows = len(data)
    decoded = block.decode(data.reshape(-1, size))
    q = torch.from_numpy(decoded.q.reshape(rows, -1))
    scales, biases = (
        _narrow(torch.from_numpy(values.reshape(rows, -1)))
        for values in (decoded.scale, decoded.bias)
    )
    return AffineWeight(pack(q, block.bits), scales, biases, block.bits, block.group)


def _narrow(values: Tensor) -> Tensor:
    """float16 where that rounds by no more than its own precision, else float32.

    Products of a block's scale and a sub-block's integer need a few bits more than float16 has:
    the rounding is at most 2^-11 of a value. Tiny ones would lose more, large ones overflow.
    """
    halves = values.half()
    close = (halves.float() - values).abs() <= values.abs() * 2**-11
    return halves if bool(close.all()) else values


class GgufSource:
    """The tensors of a GGUF file under Hugging Face's names."""

    def __init__(self, reader: Any, names: GgufNames) -> None:
        self.warnings: list[str] = []
        tensors = {t.name: t for t in reader.tensors}
        odd = [
            f"{name} {t.tensor_type.name}"
            for name, t in sorted(tensors.items())
            if t.tensor_type not in BLOCK_TYPES and t.tensor_type not in DENSE_TYPES
        ]
        if odd:
            known = [k.name for k in (*DENSE_TYPES, *BLOCK_TYPES)]
            raise UnsupportedError(f"tensor types {listing(odd)} (implemented: {', '.join(known)})")
        self._tensors = {names.rename(name): t for name, t in tensors.items()}
        self.infos = {name: self._info(t) for name, t in self._tensors.items()}

    @staticmethod
    def _info(tensor: Any) -> TensorInfo:
        shape = tuple(int(n) for n in reversed(tensor.shape))  # ne[0] is the row length
        kind = tensor.tensor_type
        if kind in DENSE_TYPES:
            return TensorInfo(DENSE_TYPES[kind], shape, int(tensor.n_bytes))
        block = BLOCK_TYPES[kind]
        return TensorInfo(f"q{block.bits}-g{block.group}", shape, int(tensor.n_bytes))

    def read(self, name: str) -> Tensor | AffineWeight:
        tensor, info = self._tensors[name], self.infos[name]
        if tensor.tensor_type in BLOCK_TYPES:
            rows = np.array(tensor.data).reshape(math.prod(info.shape[:-1]), -1)
            return affine(tensor.tensor_type, rows).of_height(info.shape[:-1])
        data = torch.from_numpy(np.array(tensor.data))
        if info.dtype == "BF16":
            data = data.view(torch.bfloat16)
        return data.reshape(info.shape)


class _Reader(gguf.GGUFReader):
    """Tells a file that is cut short before its tensors are mapped."""

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        end = start_offs
        for field in fields:
            _, _, _, dims, kind, offset = field.parts
            block, size = gguf.GGML_QUANT_SIZES[Q(int(kind[0]))]
            count = math.prod(int(n) for n in dims)
            end = max(end, start_offs + int(offset[0]) + count // block * size)
        if end > len(self.data):
            raise CheckpointError(
                f"cut short: {len(self.data):,} bytes of {end:,}; download it again"
            )
        super()._build_tensors(start_offs, fields)


def open_gguf(path: Path) -> Any:
    """A reader over `path`, which maps it; a damaged or cut file is a CheckpointError."""
    size = path.stat().st_size
    try:
        reader = _Reader(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is {error}") from None
    except (ValueError, IndexError, KeyError, OSError, OverflowError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is not a whole GGUF file ({size:,} bytes): {str(error)[:200]}"
        ) from None
    return reader

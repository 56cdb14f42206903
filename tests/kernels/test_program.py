"""A program makes what its operations made, with other values, or says why it can't."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from starquill.kernels import elementwise, program
from starquill.kernels.matmul import dense_matmul
from starquill.kernels.native import native
from starquill.kernels.program import Arena, Program, recording
from starquill.quant.affine import AffineWeight, pack

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

Step = Callable[[Tensor], Tensor]
T = TypeVar("T")


def _weight(height: int, width: int, bits: int = 4, group: int = 32) -> AffineWeight:
    generator = torch.Generator().manual_seed(height)
    q = torch.randint(0, 2**bits, (height, width), generator=generator, dtype=torch.uint8)
    scales, biases = torch.randn(2, height, width // group, generator=generator)
    return AffineWeight(pack(q, bits), scales, biases, bits, group)


def _written(step: Callable[[Tensor], T], x: Tensor) -> tuple[Program, T]:
    step(x)  # weights are made ready at their first use
    made = Program([x.clone()], Arena())
    with torch.inference_mode(), recording(made):
        out = step(made.inputs[0])
    return made, out


@pytest.mark.parametrize("level", native.isa_levels())
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_products_of_the_same_rows_are_those_made_apart(level: str, rows: int) -> None:
    """Heights that pieces of work do not divide, and one that is less than a piece."""
    bias = torch.randn(100)
    weights = [_weight(height, 96) for height in (40, 7, 100, 1, 64)]

    def products(x: Tensor) -> list[Tensor]:
        return [w.matmul(x, bias if w.shape[0] == 100 else None) for w in weights]

    was = native.isa()
    native.select_isa(level)
    try:
        made, written = _written(products, torch.randn(rows, 1, 96))
        assert made.refusal is None
        for threads in (1, 2):
            torch.set_num_threads(threads)
            x = torch.randn(rows, 1, 96)
            made.run([x])
            assert all(torch.equal(a, b) for a, b in zip(written, products(x), strict=True))
    finally:
        native.select_isa(was)


def test_memory_serves_one_operation_after_another() -> None:
    def step(x: Tensor) -> Tensor:
        for _ in range(50):
            x = elementwise.add(x, elementwise.gated(x, None, "silu"))
        return x

    made, out = _written(step, torch.randn(2, 1, 64))
    x = torch.randn(2, 1, 64)
    made.run([x])
    assert torch.equal(out, step(x))
    assert sum(len(free) for free in made._arena._free.values()) <= 3


def test_programs_of_one_arena_do_not_disturb_each_other() -> None:
    arena, ones, twos = Arena(), torch.ones(1, 1, 16), torch.full((1, 1, 16), 2.0)
    found = []
    for _ in range(2):
        made = Program([ones.clone()], arena)
        with torch.inference_mode(), recording(made):
            found.append((made, elementwise.add(made.inputs[0], made.inputs[0])))
    for made, out in found * 2:
        made.run([twos])
        assert torch.equal(out, 2 * twos)


def _by_torch(x: Tensor) -> Tensor:
    return elementwise.add(x, x * 2)


def _in_place(x: Tensor) -> Tensor:
    y = elementwise.add(x, x)
    y[0] = 1
    return elementwise.add(y, y)


def _by_numpy(x: Tensor) -> Tensor:
    return elementwise.add(x, torch.from_numpy(x.numpy() * 2))


def _by_its_value(x: Tensor) -> Tensor:
    return elementwise.add(x, x) if float(x[0, 0, 0]) > 0 else x


def _one_by_one(x: Tensor) -> Tensor:
    stack = _weight(6, 64).of_height((2, 3))
    return stack.matmul_grouped(x[:, 0], torch.tensor([1, 1]), one=True)


@pytest.mark.parametrize("step", [_by_torch, _in_place, _by_numpy, _by_its_value, _one_by_one])
def test_what_is_not_written_down_whole_is_refused(step: Step) -> None:
    made, _ = _written(step, torch.randn(2, 1, 64))
    assert made.refusal is not None


def test_a_weight_that_is_copied_is_kept() -> None:
    """Its kernel takes contiguous ones alone."""
    weight = torch.randn(8, 12).T

    def step(x: Tensor) -> Tensor:
        return dense_matmul(weight, x, None)

    made, out = _written(step, torch.randn(2, 1, 8))
    taken = [torch.full((12, 8), 1e3) for _ in range(200)]  # whatever was freed
    x = torch.randn(2, 1, 8)
    made.run([x])
    assert torch.equal(out, step(x)), len(taken)


def test_after_a_failure_nothing_is_written_down() -> None:
    made = Program([torch.ones(4)], Arena())
    with pytest.raises(ValueError, match="own"), recording(made):
        raise ValueError("own")
    assert program._recorder.program is None
    elementwise.add(torch.ones(4), torch.ones(4))
    assert made.refusal is None

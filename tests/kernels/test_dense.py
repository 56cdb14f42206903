"""Two-byte weights with float32 activations: float32's own accuracy, half of its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.kernels.native import native
from starquill.loading import load
from starquill.quant.weight import DenseWeight
from tests import tiny


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 300), st.integers(1, 20), st.booleans())
def test_products_are_those_of_float32(
    dtype: torch.dtype, rows: int, width: int, tokens: int, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * width)
    data = torch.randn(rows, width, generator=generator).to(dtype)
    data[0, 0] = 1e-7  # a denormal in float16
    x = torch.randn(tokens, width, generator=generator)
    bias = torch.randn(rows, generator=generator) if with_bias else None
    expected = x.double() @ data.double().T + (0 if bias is None else bias)
    reach = x.double().abs() @ data.double().abs().T + 1
    levels = native.isa_levels() if native is not None else [""]
    for level in levels:
        if native is not None:
            native.select_isa(level)
        off = (DenseWeight(data).matmul(x, bias) - expected).abs()
        assert bool((off <= 2.0**-20 * reach).all()), level


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_stay_as_stored_and_compute_in_float32(tmp_path: Path, stored: torch.dtype) -> None:
    state = {name: tensor.to(stored) for name, tensor in tiny.weights(tiny.config()).items()}
    folder = tiny.write_checkpoint(tmp_path, state=state)
    kept, widened = load(folder), load(folder, dtype="float32")
    layer = kept.model.model.layers[0]
    assert layer.mlp.c_fc.weight.data.dtype == stored
    assert layer.input_layernorm.weight.dtype == torch.float32
    assert widened.model.model.layers[0].mlp.c_fc.weight.data.dtype == torch.float32
    ids = tiny.random_ids(30)
    for chunk in (None, 1, 7, 20):
        ours = tiny.our_logits(kept, ids, chunk)
        torch.testing.assert_close(ours, tiny.our_logits(widened, ids), rtol=0, atol=2e-5)


def test_what_is_not_finite_shows() -> None:
    data = torch.ones(3, 40, dtype=torch.bfloat16)
    x = torch.ones(2, 40)
    x[0, 39] = float("nan")
    y = DenseWeight(data).matmul(x)
    assert bool(y[0].isnan().all())
    assert bool((y[1] == 40).all())

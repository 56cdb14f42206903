"""The native range search and hqq beside the same in torch, on every instruction set."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from starquill.kernels.native import native
from starquill.quant import quantize as module
from starquill.quant.affine import BITS, GROUPS, AffineWeight
from starquill.quant.quantize import quantize
from starquill.quant.schemes import Scheme

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

LEVELS = native.isa_levels()


def _error(made: AffineWeight, weight: Tensor, importance: Tensor | None) -> Tensor:
    off = (made.dequantize().double() - weight.double()).square()
    off = off if importance is None else off * importance.double()
    return off.unflatten(-1, (-1, made.group)).sum(-1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("method", ["rtn", "hqq"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_native_and_torch_find_the_same(
    monkeypatch: pytest.MonkeyPatch, bits: int, group: int, dtype: torch.dtype, method: str
) -> None:
    generator = torch.Generator().manual_seed(bits * group)
    weight = (torch.randn(13, 3 * group, generator=generator) * 0.3).to(dtype)
    weight[3, :group] = 0.25
    weight[4, :group] = 0
    scheme = Scheme(bits, group, method)
    for importance in (None, torch.rand(3 * group, generator=generator)):
        found = []
        for level in LEVELS:
            native.select_isa(level)
            found.append(quantize(weight, scheme, importance))
        native.select_isa(LEVELS[-1])
        for other in found[1:]:
            assert torch.equal(found[0].packed, other.packed)
            assert torch.equal(found[0].scales, other.scales)
            assert torch.equal(found[0].biases, other.biases)
        with monkeypatch.context() as patch:
            patch.setattr(module, "serves", lambda *_: False)
            plain = quantize(weight, scheme, importance)
        # Sums in another order may tip a tie between two equally good fits, no more.
        ours, theirs = (_error(made, weight, importance) for made in (found[0], plain))
        tolerance = 0.02 if method == "rtn" else 0.05
        torch.testing.assert_close(ours.sum(), theirs.sum(), rtol=tolerance, atol=1e-7)
        same = (found[0].integers() == plain.integers()).float().mean()
        assert float(same) > (0.99 if method == "rtn" else 0.9)


def test_without_the_module_torch_computes_and_says_so() -> None:
    code = (
        "import sys; sys.modules['starquill.kernels._native'] = None\n"
        "import starquill\n"
        "model = starquill.load('default', quant='4')\n"
        "request = starquill.GenerateRequest('a', (1, 2), starquill.SamplingParams(max_tokens=2))\n"
        "print(len([d for d in starquill.Engine(model).generate(request)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "native kernels are missing" in line]
    assert len(warnings) == 1
    assert "slower" in warnings[0]

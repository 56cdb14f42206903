"""Experts by hand: who works, in which order sums go, and what a router says."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from starquill.kernels.native import FLOAT_TYPES
from starquill.nn.activation import silu
from starquill.nn.experts import ExpertShape, GatedExperts, PlainExperts, SparseMlp, mixed
from starquill.nn.linear import Linear
from starquill.nn.norm import RMSNorm
from starquill.nn.router import Routes, sparsemixer, top_of_softmax
from starquill.quant.affine import AffineWeight, stack
from starquill.quant.quantize import quantize
from starquill.quant.schemes import parse_scheme
from starquill.quant.weight import DenseWeight, PermutedWeight

E, D, INNER = 5, 32, 64


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 4


def _gated(quantized: bool = False, unused: tuple[int, ...] = ()) -> GatedExperts:
    """Experts of random weights; those `unused` have NaN."""
    experts = GatedExperts(ExpertShape(E, D, INNER, "silu", bias=True))
    shapes = {"gate_proj": (E, INNER, D), "up_proj": (E, INNER, D), "down_proj": (E, D, INNER)}
    for seed, (name, shape) in enumerate(shapes.items()):
        part, values = experts.get_submodule(name), _random(*shape, seed=seed)
        weight = quantize(values, parse_scheme("q4-g32")) if quantized else DenseWeight(values)
        damaged = weight.scales if isinstance(weight, AffineWeight) else weight.data
        damaged[list(unused)] = math.nan
        part.weight = weight
        part.bias = torch.nn.Parameter(_random(shape[0], shape[1], seed=9), requires_grad=False)
        part.bias[list(unused)] = math.nan
    return experts


def _by_definition(experts: GatedExperts, x: Tensor, routes: Routes) -> Tensor:
    """Every token through its experts, one by one."""
    parts = (experts.gate_proj, experts.up_proj, experts.down_proj)
    (gate, g), (up, u), (down, d) = ((p.weight.dequantize(), p.bias) for p in parts)
    out = torch.zeros_like(x)
    for place in torch.cartesian_prod(*map(torch.arange, x.shape[:-1])).tolist():
        at = tuple(place)
        for e, weight in zip(routes.experts[at].tolist(), routes.weights[at], strict=True):
            inner = F.silu(gate[e] @ x[at] + g[e]) * (up[e] @ x[at] + u[e])
            out[at] += weight * (down[e] @ inner + d[e])
    return out


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (1, 13), (1, 200)])
@pytest.mark.parametrize("chosen", [(3,), (4, 1), (0, 1, 2, 3, 4)])
def test_experts_that_nobody_chose_show_nowhere(
    chosen: tuple[int, ...], shape: tuple[int, int], quantized: bool
) -> None:
    """Theirs are NaN, which any product would carry on."""
    unused = tuple(set(range(E)) - set(chosen))
    experts, x = _gated(quantized, unused), _random(*shape, D, seed=3)
    for layer in (experts.gate_proj, experts.up_proj, experts.down_proj):
        if isinstance(layer.weight, AffineWeight):
            layer.weight = layer.weight.computing(torch.float32, exact=True)
    weights = _random(*shape, len(chosen), seed=4).softmax(-1)
    order = torch.stack([torch.tensor(chosen).roll(n) for n in range(math.prod(shape))])
    routes = Routes(order.view(*shape, -1), weights)
    y = mixed(x, routes, E, experts)
    torch.testing.assert_close(y, _by_definition(experts, x, routes), atol=1e-5, rtol=1e-4)


def test_plain_experts() -> None:
    experts = PlainExperts(ExpertShape(2, 4, 6, "relu"))
    fc, proj = _random(2, 6, 4), _random(2, 4, 6, seed=1)
    experts.c_fc.weight, experts.c_proj.weight = DenseWeight(fc), DenseWeight(proj)
    x = _random(1, 3, 4, seed=2)
    routes = Routes(torch.tensor([[[0], [1], [0]]]), torch.tensor([[[0.5], [1.0], [2.0]]]))
    y = mixed(x, routes, 2, experts)
    for token, (expert, weight) in enumerate(((0, 0.5), (1, 1.0), (0, 2.0))):
        expected = weight * (proj[expert] @ F.relu(fc[expert] @ x[0, token]))
        torch.testing.assert_close(y[0, token], expected)


@pytest.mark.parametrize("width", [8, 24, 60, 64, 1000])
def test_silu_of_a_row_is_the_same_in_any_company(width: int) -> None:
    x = _random(33, 1, width) * 40
    torch.testing.assert_close(silu(x), F.silu(x), atol=1e-6, rtol=1e-6)
    for row in range(len(x)):
        assert torch.equal(silu(x[row : row + 1]), silu(x)[row : row + 1])
    extremes = torch.tensor([[[-1e4, -100.0, 0.0, 100.0, math.nan, math.inf]]])
    torch.testing.assert_close(silu(extremes), F.silu(extremes), equal_nan=True)


@pytest.mark.parametrize("width", [8, 60, 64, 2048])
def test_rms_norm(width: int) -> None:
    norm = RMSNorm(width, 1e-5)
    norm.weight = torch.nn.Parameter(1 + _random(width), requires_grad=False)
    x = _random(9, 1, width, seed=1) * 10
    expected = norm.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(norm(x), expected)
    for row in range(len(x)):
        assert torch.equal(norm(x[row : row + 1]), norm(x)[row : row + 1])
    heads = x.view(3, 1, 3 * width)  # each is normalised by itself
    assert torch.equal(norm(heads), norm(x.view(3, 1, 3, width)).flatten(2))
    halves = x.bfloat16()
    assert norm(halves).dtype is torch.bfloat16
    torch.testing.assert_close(norm(halves), norm(halves.float()).bfloat16())


def test_top_of_softmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).log_softmax(-1)
    for normalise in (False, True):
        routes = top_of_softmax(logits.bfloat16(), 2, normalise)
        assert routes.experts.tolist() == [[1, 3]]
        expected = logits.bfloat16().float().softmax(-1)[0, [1, 3]]
        expected = expected / expected.sum() if normalise else expected
        torch.testing.assert_close(routes.weights[0], expected)


def test_sparsemixer_equals_transformers() -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer as theirs

    for scale in (0.01, 1.0, 30.0):
        logits = _random(500, 7) * scale
        for jitter in (0.01, 0.3):
            weights, experts = theirs(logits, jitter, training=False)
            routes = sparsemixer(logits, jitter)
            assert torch.equal(routes.experts, experts)
            assert torch.equal(routes.weights, weights)


def test_the_router_is_a_linear_of_its_own() -> None:
    gate = Linear(D, E, bias=True)
    gate.weight = DenseWeight(_random(E, D, seed=7))
    gate.bias = torch.nn.Parameter(torch.tensor([9.0, 0, 0, 0, 0]), requires_grad=False)
    experts = _gated(unused=(1, 2, 3, 4))
    block = SparseMlp(gate, experts, partial(top_of_softmax, top=1, normalise=True))
    x = _random(2, 1, D)
    routes = Routes(torch.zeros(2, 1, 1, dtype=torch.int64), torch.ones(2, 1, 1))
    torch.testing.assert_close(block(x, None), _by_definition(experts, x, routes))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_dense_stacks_multiply_as_their_matrices(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    stack = DenseWeight(torch.randn(4, 24, 40, generator=generator).to(dtype))
    x = torch.randn(9, 40, generator=generator)
    counts = torch.tensor([2, 0, 6, 1])
    expected = torch.cat(
        [rows @ stack.data[e].float().T for e, rows in enumerate(x.split(counts.tolist()))]
    )
    for one in (True, False):
        y = stack.matmul_grouped(x, counts, one=one)
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=0)


def test_stacks_of_quantized_matrices() -> None:
    """One whose scales are float32, because float16 would lose it, widens those of all."""
    scheme = parse_scheme("q4-g32")
    matrices = [quantize(_random(8, 64, seed=e) * s, scheme) for e, s in enumerate((1, 1e-4, 1))]
    whole = stack(matrices).computing(torch.float32, exact=True)
    assert whole.shape == (3, 8, 64)
    assert {m.scales.dtype for m in matrices} == {torch.float16, torch.float32}
    x, counts = _random(4, 64, seed=5), torch.tensor([1, 0, 3])
    order = torch.arange(64).flip(0)
    plain = whole.computing(torch.float32, exact=True)
    vars(plain)["_kernel"] = None  # as where the native module is missing
    for weight, inputs in ((whole, x), (PermutedWeight(whole, order), x[:, order]), (plain, x)):
        y = weight.matmul_grouped(inputs, counts)
        expected = [rows @ matrices[e].dequantize().T for e, rows in ((0, x[:1]), (2, x[1:]))]
        torch.testing.assert_close(y, torch.cat(expected), atol=1e-5, rtol=1e-4)

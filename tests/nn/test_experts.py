"""Experts by hand: who works, in which order sums go, and what a router says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from starquill.kernels import elementwise
from starquill.kernels.native import FLOAT_TYPES, native
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


@pytest.mark.parametrize("ours", [True, False])
def test_sparsemixer_equals_transformers(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit in torch, to rounding in native code."""
    from transformers.models.phimoe.modeling_phimoe import sparsemixer as theirs

    if not ours:
        monkeypatch.setattr(elementwise, "takes", lambda _: False)
    for scale in (0.01, 1.0, 30.0):
        logits = _random(500, 7) * scale
        for jitter in (0.01, 0.3):
            weights, experts = theirs(logits, jitter, training=False)
            routes = sparsemixer(logits, jitter)
            assert torch.equal(routes.experts, experts)
            rounding = {"rtol": 2e-6, "atol": 0.0} if ours else {"rtol": 0.0, "atol": 0.0}
            torch.testing.assert_close(routes.weights, weights, **rounding)
    bad = sparsemixer(torch.tensor([[0.0, float("nan"), 1.0]]), 0.1)
    assert bad.weights.isnan().any()
    assert bad.experts.max() < 3


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


def _rounding(name: str, gate: str = "q4-g32", up: str = "q4-g32") -> GatedExperts | PlainExperts:
    """Quantized experts with biases, `gate` and `up` in schemes of their own."""
    kind = GatedExperts if name == "gated" else PlainExperts
    experts = kind(
        ExpertShape(E, D, INNER, "silu" if name == "gated" else "gelu_pytorch_tanh", True)
    )
    for seed, (layer, scheme) in enumerate(zip(experts.stacks, (gate, up, "q8-g16"), strict=True)):
        if layer is not None:
            shape = layer.weight.shape
            layer.weight = quantize(_random(*shape, seed=seed) * 3, parse_scheme(scheme))
            bias = _random(shape[0], shape[1], seed=9 + seed)
            layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return experts


def _routes(*shape: int, top: int = 2, seed: int = 1) -> Routes:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(*shape, E, generator=generator).argsort(-1)[..., :top].contiguous()
    return Routes(experts, torch.rand(*shape, top, generator=generator))


needs_native = pytest.mark.skipif(native is None, reason="the native kernels are missing")
LEVELS = [] if native is None else native.isa_levels()


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    assert native is not None
    before = native.isa()
    native.select_isa(request.param)
    yield
    native.select_isa(before)


@needs_native
@pytest.mark.parametrize("isa", LEVELS, indirect=True)
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (1, 2), (1, 13), (2, 9), (1, 600), (600, 1)])
@pytest.mark.parametrize(
    "kind", [("gated", "q4-g32", "q4-g32"), ("gated", "q3-g16", "q2-g32"), ("plain",)]
)
def test_all_experts_at_once(isa: None, kind: tuple[str, ...], shape: tuple[int, int]) -> None:
    """As product by product, but for activations that fall to the other side of a step."""
    experts, x, routes = _rounding(*kind), _random(*shape, D, seed=3), _routes(*shape, top=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("starquill.nn.experts.weighted", None)  # which the second must not need
        one_by_one = mixed(x, routes, E, lambda rows, groups: experts(rows, groups))
    off = (mixed(x, routes, E, experts) - one_by_one).abs()
    assert off.max() < 2e-2 * one_by_one.abs().max()
    assert off.mean() < 1e-4 * one_by_one.abs().max()


@needs_native
@pytest.mark.parametrize("kind", ["gated", "plain"])
def test_all_experts_at_once_in_any_company(kind: str) -> None:
    """To the bit: single tokens of several sequences, and tokens of a longer or shorter piece."""
    experts, x, routes = _rounding(kind), _random(40, 1, D, seed=3), _routes(40, 1)
    for count in (1, 3, 40):
        for start in range(0, 40, count):
            here = slice(start, start + count)
            some = mixed(x[here], Routes(routes.experts[here], routes.weights[here]), E, experts)
            assert torch.equal(some, mixed(x, routes, E, experts)[here])
    piece, whole = x.transpose(0, 1), Routes(*(r.transpose(0, 1) for r in _both(routes)))
    for count in (2, 5, 39):
        part = Routes(*(r[:, :count] for r in _both(whole)))
        some = mixed(piece[:, :count], part, E, experts)
        assert torch.equal(some, mixed(piece, whole, E, experts)[:, :count])


def _both(routes: Routes) -> tuple[Tensor, Tensor]:
    return routes.experts, routes.weights


@needs_native
def test_all_experts_at_once_do_not_depend_on_threads() -> None:
    experts = _rounding("gated")
    before = torch.get_num_threads()
    try:
        for shape in ((3, 1), (1, 90)):
            x, routes, found = _random(*shape, D), _routes(*shape), []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                found.append(mixed(x, routes, E, experts))
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("wrong", [-1, E])
def test_an_expert_that_is_not_there(wrong: int) -> None:
    routes = Routes(torch.tensor([[[0, wrong]]]), torch.ones(1, 1, 2))
    with pytest.raises(IndexError, match="not in the stack"):
        mixed(_random(1, 1, D), routes, E, _rounding("gated"))


@needs_native
def test_experts_with_damaged_values_show_them() -> None:
    experts, x = _rounding("gated"), _random(1, 4, D)
    x[0, 2, 5] = math.nan
    y = mixed(x, _routes(1, 4), E, experts)
    assert y[0, 2].isnan().all()
    assert y[0, [0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("count", [1, 2, 7, 128])
def test_top_of_softmax_of_many(count: int) -> None:
    logits = _random(33, 5, count) * 20
    for top in {1, min(8, count), count}:
        for normalise in (False, True):
            chances, experts = logits.softmax(-1).topk(top)
            chances = chances / chances.sum(-1, keepdim=True) if normalise else chances
            routes = top_of_softmax(logits, top, normalise)
            # Far below the best they are zeros, of which none comes before another.
            clear = chances > 1e-30
            assert torch.equal(routes.experts[clear], experts[clear])
            torch.testing.assert_close(routes.weights, chances, atol=1e-6, rtol=1e-5)
            assert all(len(set(row)) == top for row in routes.experts.flatten(0, 1).tolist())


@needs_native
def test_a_router_that_is_not_finite_chooses_experts_that_exist() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        logits = torch.tensor([[[0.0, bad, 1.0]], [[bad, bad, bad]]])
        routes = top_of_softmax(logits, 2, normalise=True)
        assert all(set(row) <= {0, 1, 2} for row in routes.experts.flatten(0, 1).tolist())
        if bad != -math.inf:
            assert routes.weights.isnan().any(-1).all()

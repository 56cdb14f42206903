"""Rounding with second moments: less error of the product, never more than without, odd inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from starquill.quant.affine import AffineWeight
from starquill.quant.feedback import block_width, damped
from starquill.quant.quantize import quantize
from starquill.quant.schemes import Scheme

FEW = [Scheme(2, 32, "hqq"), Scheme(3, 128, "hqq"), Scheme(4, 64, "hqq"), Scheme(8, 16, "hqq")]
few_schemes = pytest.mark.parametrize("scheme", FEW, ids=str)
WIDTH = 256


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _inputs(kind: str) -> Tensor:
    """`[N, in]` such as norms and activations give: correlated, with a mean, some much larger."""
    x = _normal(1000, WIDTH, seed=1)
    if kind == "independent":
        return x
    if kind == "outliers":
        x[:, 7] *= 100
    if kind == "never":
        x[:, 32:96] = 0
    if kind == "few":
        return x[:20]
    return x @ _normal(WIDTH, WIDTH, seed=2) / 16 * (x[:1] != 0) + 0.5 * (x[:1] != 0)


KINDS = ("independent", "correlated", "outliers", "never", "few")


def _products(x: Tensor, width: int = WIDTH) -> Tensor:
    blocks = x.unflatten(1, (-1, width)).transpose(0, 1)
    return blocks.transpose(1, 2) @ blocks / len(x)


def _told(weight: Tensor, scheme: Scheme, products: Tensor) -> AffineWeight:
    importance = products.diagonal(dim1=-2, dim2=-1).flatten()
    return quantize(weight, scheme, importance, products)


def _loss(weight: Tensor, made: AffineWeight, products: Tensor) -> Tensor:
    """What `refine` lowers, of each row and each run of inputs, `[R, in/n]`."""
    width = products.shape[-1]
    off = (made.dequantize() - weight).double().unflatten(1, (-1, width))
    h = torch.stack([damped(run) for run in products]).double()
    return torch.einsum("rbi,bij,rbj->rb", off, h, off)


@few_schemes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [128, 256])
def test_no_row_is_worse_than_rounded_to_nearest(scheme: Scheme, kind: str, width: int) -> None:
    weight, products = _normal(24, WIDTH), _products(_inputs(kind), width)
    importance = products.diagonal(dim1=-2, dim2=-1).flatten()
    ours = _loss(weight, _told(weight, scheme, products), products)
    nearest = _loss(weight, quantize(weight, scheme, importance), products)
    assert bool((ours <= nearest * (1 + 1e-4)).all())


@pytest.mark.parametrize(("bits", "share"), [(2, 0.75), (3, 0.7), (4, 0.7)])
def test_correlated_inputs_make_up_for_each_others_errors(bits: int, share: float) -> None:
    """The error of the product on other inputs of the kind, beside the range search's."""
    x = _inputs("correlated")
    weight, products = _normal(64, WIDTH), _products(x[:900])
    importance = products[0].diagonal()
    theirs = quantize(weight, Scheme(bits, 64, "rtn"), importance)
    ours = _told(weight, Scheme(bits, 64, "hqq"), products)
    errors = [
        float((x[900:] @ (made.dequantize() - weight).T).square().sum()) for made in (ours, theirs)
    ]
    assert errors[0] < share * errors[1]


@few_schemes
@pytest.mark.parametrize("size", [1e-40, 1e-20, 1e-3, 5e4, 1e6, 1e37])
def test_any_size_of_weights(scheme: Scheme, size: float) -> None:
    weight, products = _normal(4, WIDTH).clamp(-1, 1) * size, _products(_inputs("correlated"))
    made = _told(weight, scheme, products)
    held = made.dequantize()
    assert bool(held.isfinite().all())
    assert bool(made.scales.isfinite().all())
    off, span = (held - weight).double().abs().max(), float(weight.amax() - weight.amin())
    assert float(off) <= span


@few_schemes
@pytest.mark.parametrize("value", [0.0, 1.0, -0.75, 1000.0])
def test_an_all_equal_matrix_is_its_value(scheme: Scheme, value: float) -> None:
    weight = torch.full((3, WIDTH), value)
    held = _told(weight, scheme, _products(_inputs("correlated"))).dequantize()
    torch.testing.assert_close(held, weight, rtol=2**-10, atol=0)


@few_schemes
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e30])
def test_products_of_any_size(scheme: Scheme, factor: float) -> None:
    weight, products = _normal(4, WIDTH), _products(_inputs("correlated")) * factor
    held = _told(weight, scheme, products).dequantize()
    assert float((held - weight).abs().max()) < 4 / 2**scheme.bits + 2


def test_rows_do_not_depend_on_their_bands() -> None:
    weight, products = _normal(4100, 64), _products(_inputs("correlated"))[:, :64, :64]
    scheme = Scheme(3, 32, "hqq")
    made = _told(weight, scheme, products)
    tail = _told(weight[4096:], scheme, products)
    ours, alone = _loss(weight, made, products)[4096:], _loss(weight[4096:], tail, products)
    torch.testing.assert_close(ours, alone, rtol=0.05, atol=0)


@few_schemes
def test_the_same_input_gives_the_same_bytes(scheme: Scheme) -> None:
    weight, products = _normal(9, WIDTH), _products(_inputs("correlated"))
    kept = weight.clone(), products.clone()
    first, second = (_told(weight, scheme, products) for _ in range(2))
    assert torch.equal(weight, kept[0])
    assert torch.equal(products, kept[1])
    for part in ("packed", "scales", "biases"):
        assert torch.equal(getattr(first, part), getattr(second, part))


def test_the_range_search_does_without() -> None:
    weight, products = _normal(9, WIDTH), _products(_inputs("correlated"))
    importance, scheme = products[0].diagonal(), Scheme(3, 64, "rtn")
    told, plain = (
        quantize(weight, scheme, importance, products),
        quantize(weight, scheme, importance),
    )
    assert torch.equal(told.packed, plain.packed)


@pytest.mark.parametrize(
    ("width", "block"),
    [
        (256, 256),
        (1024, 512),
        (3072, 512),
        (4608, 512),
        (1536, 512),
        (1664, 128),
        (576, 192),
        (48, 48),
        (100, 0),
        (8, 0),
    ],
)
def test_blocks_are_of_whole_groups(width: int, block: int) -> None:
    assert block_width(width) == block
    for group in (16, 32, 64, 128):
        if block and width % group == 0:
            assert block % group == 0

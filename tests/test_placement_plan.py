"""Plans: every layer once, budgets kept, best of all cuts, the same each time; golden plans."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.errors import BadRequestError
from starquill.nn.cache import BLOCK, CacheShape
from starquill.placement.devices import slowness
from starquill.placement.maps import DeviceMap, read_device_map
from starquill.placement.offers import Variant, offers
from starquill.placement.plan import DoesNotFitError, LayerPlan, Placement, plan
from starquill.placement.sizes import ModelSizes, Names, Needs, TensorSize, sizes_of

GB = 10**9
RESERVE = {"cuda": 3, "mps": 2, "cpu": 1, "disk": 0}
SIZES = ModelSizes(
    layers=(4, 4, 4, 4),
    embedding=6,
    head=1,
    tied=True,
    cache_per_token=0,
    row=0,
    logits_row=0,
    block=1,
    chunk=1,
)  # a device with layers has a mask of 8 bytes besides
NEEDS = Needs(1, 1, dict.fromkeys(RESERVE, 0))


# --- properties ---


@st.composite
def models(draw: st.DrawFn) -> ModelSizes:
    small = st.integers(0, 3)
    return ModelSizes(
        layers=tuple(draw(st.lists(st.integers(1, 20), min_size=3, max_size=6))),
        embedding=draw(st.integers(1, 30)),
        head=draw(st.integers(1, 30)),
        tied=draw(st.booleans()),
        cache_per_token=draw(st.integers(0, 2)),
        row=draw(small),
        logits_row=draw(small),
        window=draw(st.none() | st.integers(1, 4)),
        block=draw(st.integers(1, 2)),
        chunk=draw(st.integers(1, 2)),
    )


@st.composite
def mixtures(draw: st.DrawFn) -> ModelSizes:
    sizes = draw(models())
    active = [draw(st.integers(1, weights)) for weights in sizes.layers]
    return replace(sizes, active=tuple(active)) if draw(st.booleans()) else sizes


@st.composite
def machines(draw: st.DrawFn) -> dict[str, float]:
    devices = ("cuda:0", "cuda:1", "mps", "cpu", "disk")
    chosen = draw(st.lists(st.sampled_from(devices), min_size=2, max_size=4, unique=True))
    if "disk" in chosen and "cpu" not in chosen:
        chosen.append("cpu")
    # Given in any order; small enough that most models do not fit on one device.
    room = st.integers(30, 170)
    disk = st.sampled_from([math.inf, 20.0, 60.0])
    return {device: draw(disk if device == "disk" else room) for device in chosen}


# What does not fit into memory is read from disk, which needs some of that memory.
SMALL = st.fixed_dictionaries(
    {"disk": st.sampled_from([math.inf, 60.0]), "cpu": st.integers(60, 170)}
)
NEED = st.builds(Needs, st.integers(1, 3), st.integers(1, 2), st.just(RESERVE))


def taken(sizes: ModelSizes, needs: Needs, devices: DeviceMap) -> Counter[str]:
    """What each device gives, from the definition alone."""
    span = needs.max_seq_len
    blocks = math.ceil(span / sizes.block)
    if sizes.window is not None:
        held = sizes.window + sizes.chunk + 1
        blocks = min(blocks, math.ceil(held / sizes.block) + 1)
    kept = (blocks + 1) * sizes.block
    cache = (needs.max_batch_size * kept + sizes.block) * sizes.cache_per_token
    rows = max(min(sizes.chunk, span), needs.max_batch_size)
    total = Counter[str]()
    where = [devices.embed, *devices.layers, devices.head]
    for device, weights in zip(where, (sizes.embedding, *sizes.layers, sizes.head), strict=True):
        total[device] += weights
    computing = ["cpu" if device == "disk" else device for device in devices.layers]
    for device in computing:
        total[device] += cache
    for device in set(computing):
        total[device] += rows * sizes.row + rows * kept * 4 + cache
    total["cpu" if devices.head == "disk" else devices.head] += rows * sizes.logits_row
    if "disk" in where:
        read = [w for d, w in zip(devices.layers, sizes.layers, strict=True) if d == "disk"]
        read += [sizes.head] if devices.head == "disk" else []
        read += [sizes.embedding] if devices.embed == "disk" and sizes.tied else []
        total["cpu"] += 2 * max(read, default=0)
    for device in {*where, *computing, *(["cpu"] if "disk" in where else [])}:
        total[device] += needs.reserve[device.partition(":")[0]]
    return total


def fits(sizes: ModelSizes, needs: Needs, budgets: Mapping[str, float], found: DeviceMap) -> bool:
    return all(size <= budgets[device] for device, size in taken(sizes, needs, found).items())


def every_map(sizes: ModelSizes, budgets: Mapping[str, float]) -> Iterator[DeviceMap]:
    """All that keep each device's layers together, the fastest first."""
    order = sorted(budgets, key=slowness)
    count = len(sizes.layers)
    for cuts in itertools.combinations_with_replacement(range(count + 1), len(order) - 1):
        edges = [0, *cuts, count]
        layers = [d for i, d in enumerate(order) for _ in range(edges[i + 1] - edges[i])]
        for embed, head in itertools.product(order, order):
            if embed == head or not sizes.tied:
                yield DeviceMap(tuple(layers), embed, head)


def read(sizes: ModelSizes, budgets: Mapping[str, float], found: DeviceMap) -> list[int]:
    """Bytes that a token reads on each device, the fastest first."""
    total = Counter({found.head: sizes.head + (sizes.embedding if sizes.tied else 0)})
    for device, active in zip(found.layers, sizes.active or sizes.layers, strict=True):
        total[device] += active
    return [total[device] for device in sorted(budgets, key=slowness)]


@settings(max_examples=400, deadline=None)
@given(mixtures(), machines() | SMALL, NEED)
def test_plans_are_the_best_of_all(
    sizes: ModelSizes, budgets: dict[str, float], needs: Needs
) -> None:
    possible = [m for m in every_map(sizes, budgets) if fits(sizes, needs, budgets, m)]
    if not possible:
        with pytest.raises(DoesNotFitError) as caught:
            plan(sizes, budgets, needs)
        assert caught.value.asked > caught.value.free >= 0
        return
    found = plan(sizes, budgets, needs)
    best = max(read(sizes, budgets, m) for m in possible)
    assert read(sizes, budgets, found.devices) == best


@given(models(), machines() | SMALL, NEED)
def test_plans_keep_the_rules(sizes: ModelSizes, budgets: dict[str, float], needs: Needs) -> None:
    try:
        found = plan(sizes, budgets, needs)
    except DoesNotFitError:
        return
    assert len(found.layers) == len(sizes.layers)  # each layer has one entry
    ranges = [device for device, _, _ in found.devices.ranges()]
    assert ranges == sorted(set(ranges), key=slowness)  # each device has one range
    assert not sizes.tied or found.embed == found.head
    assert {d: use.total for d, use in found.uses.items()} == taken(sizes, needs, found.devices)
    assert all(use.total <= budgets[device] for device, use in found.uses.items())
    weights = sum(use.weights for use in found.uses.values())
    assert weights == sizes.weights == sum(sizes.layers) + sizes.embedding + sizes.head
    shuffled = dict(reversed(budgets.items()))
    assert plan(sizes, shuffled, needs) == found
    assert plan(sizes, budgets, needs, found.devices) == found
    assert list(found.uses) == sorted(found.uses, key=slowness)


@given(models(), machines(), NEED)
def test_more_memory_never_fits_less(
    sizes: ModelSizes, budgets: dict[str, float], needs: Needs
) -> None:
    try:
        found = plan(sizes, budgets, needs)
    except DoesNotFitError:
        return
    more = {device: room + 7 for device, room in budgets.items()}
    assert read(sizes, more, plan(sizes, more, needs).devices) >= read(
        sizes, budgets, found.devices
    )


@given(models(), machines(), NEED)
def test_offers_fit_and_are_the_most(
    sizes: ModelSizes, budgets: dict[str, float], needs: Needs
) -> None:
    """Of a model that has no room: whatever is offered is a plan for just that."""
    needs = replace(needs, max_seq_len=needs.max_seq_len * 512)
    budgets = {device: room * 200 for device, room in budgets.items()}
    half = replace(sizes, layers=tuple(w // 2 for w in sizes.layers))
    found = offers([Variant(None, sizes), Variant("4", half)], budgets, needs)
    for offer in found:
        chosen = sizes if offer.quant is None else half
        assert plan(chosen, budgets, offer.needs) == offer.placement
        assert offer.needs.max_seq_len <= needs.max_seq_len
        if offer.needs.max_seq_len < needs.max_seq_len - 256 and offer.quant is None:
            longer = replace(offer.needs, max_seq_len=offer.needs.max_seq_len + 256)
            with pytest.raises(DoesNotFitError):
                plan(sizes, budgets, longer)


# --- single facts ---


@pytest.mark.parametrize("window", [None, 1, 64, 100, 4096])
@pytest.mark.parametrize("span", [1, 64, 65, 577, 16384])
def test_caches_are_counted_as_the_engine_takes_them(span: int, window: int | None) -> None:
    """The engine's need for a sequence is `most_blocks` of its cache, and one."""
    sizes = replace(SIZES, window=window, block=BLOCK, chunk=512)
    expected = (CacheShape(4, 1, 8, window).most_blocks(span, 513) + 1) * BLOCK
    assert sizes.cached_tokens(Needs(span)) == expected


def test_b62_a_tied_matrix_counts_once() -> None:
    """B62: memory for a tied pair was counted twice."""
    found = plan(SIZES, {"cpu": 31}, NEEDS)
    assert found.uses["cpu"].total == 6 + 4 * 4 + 1 + 8
    with pytest.raises(DoesNotFitError):
        plan(SIZES, {"cpu": 30}, NEEDS)


def test_an_embedding_that_is_only_looked_up_makes_room_for_layers() -> None:
    sizes = replace(SIZES, tied=False, head=6)
    found = plan(sizes, {"cuda:0": 30, "cpu": 100}, NEEDS)
    assert str(found.devices) == "cuda:0=0-3,embed=cpu,head=cuda:0"
    found = plan(sizes, {"cuda:0": 36, "cpu": 100}, NEEDS)
    assert str(found.devices) == "cuda:0=0-3,embed=cuda:0,head=cuda:0"


def test_schemes_go_with_their_layers() -> None:
    sizes = replace(SIZES, schemes=("q4-g64", None, "q8-g64", "q4-g64, dense"))
    found = plan(sizes, {"cuda:0": 23, "cpu": 16}, NEEDS)
    assert found.layers == (
        LayerPlan("cuda:0", "q4-g64"),
        LayerPlan("cuda:0", None),
        LayerPlan("cpu", "q8-g64"),
        LayerPlan("cpu", "q4-g64, dense"),
    )


def test_what_is_on_disk_needs_memory_to_be_read_into() -> None:
    found = plan(SIZES, {"cpu": 27, "disk": math.inf}, NEEDS)
    assert str(found.devices) == "cpu=0-0,disk=1-3,embed=cpu,head=cpu"
    assert found.uses["cpu"].buffers == 8
    assert found.uses["disk"].total == 12
    with pytest.raises(BadRequestError, match="give --max-memory a cpu=SIZE beside disk"):
        plan(SIZES, {"disk": math.inf}, NEEDS)


def test_no_device_at_all() -> None:
    with pytest.raises(BadRequestError, match="no device to plan for"):
        plan(SIZES, {}, NEEDS)


@pytest.mark.parametrize(
    ("budgets", "text"),
    [
        ({"cpu": 5}, "the embedding does not fit on cpu: it asks for 6 B (weights 6 B) and 5 B of "
                     "5 B are free"),
        ({"cpu": 25}, "layer 2 does not fit on cpu: it asks for 4 B (weights 4 B) and 3 B of 25 B "
                      "are free"),
        ({"cpu": 30}, "the head does not fit on cpu: it asks for 1 B (weights 1 B) and 0 B of 30 B "
                      "are free"),
        ({"cuda:0": 19, "cpu": 19}, "layer 3 does not fit on cpu"),
        ({"cpu": 19, "disk": 100}, "layer 0 does not fit on cpu: it asks for "),
    ],
)  # fmt: skip
def test_the_first_that_does_not_fit_is_named(budgets: dict[str, float], text: str) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        plan(SIZES, budgets, NEEDS)
    assert str(caught.value).startswith(text)


def test_a_map_is_held_against_the_budgets() -> None:
    devices = read_device_map("cuda:0=0-2,cpu=3", 4, tied=True)
    assert plan(SIZES, {"cuda:0": 27}, NEEDS, devices).devices == devices
    assert plan(SIZES, {}, NEEDS, devices).devices == devices
    with pytest.raises(DoesNotFitError, match="layer 2 does not fit on cuda:0") as caught:
        plan(SIZES, {"cuda:0": 25, "cpu": 99}, NEEDS, devices)
    assert (caught.value.asked, caught.value.free) == (4, 3)
    with pytest.raises(DoesNotFitError, match="layer 3 does not fit on cpu"):
        plan(SIZES, {"cuda:0": 99, "cpu": 3}, NEEDS, devices)


def test_needs_that_make_no_sense() -> None:
    Needs(64, 1).check(64)
    with pytest.raises(BadRequestError, match=r"max_seq_len is 65 \(expected 1 to 64\); max_batch"):
        Needs(65, 0).check(64)


def test_offers_change_one_thing_or_all() -> None:
    sizes = replace(SIZES, cache_per_token=1, block=256, chunk=1)
    small = replace(sizes, layers=(1, 1, 1, 1))
    variants = [Variant(None, sizes), Variant("2", small)]
    needs = replace(NEEDS, max_seq_len=2048, max_batch_size=2)
    all_of_it = plan(sizes, {"cpu": math.inf}, needs).uses["cpu"].total
    found = offers(variants, {"cpu": all_of_it - 12}, needs)
    assert [(o.quant, o.needs.max_seq_len, o.needs.max_batch_size) for o in found] == [
        ("2", 2048, 2), (None, 1792, 2), (None, 2048, 1),
    ]  # fmt: skip
    needs = replace(needs, max_seq_len=512)
    least = plan(small, {"cpu": math.inf}, replace(needs, max_seq_len=256, max_batch_size=1))
    found = offers(variants, {"cpu": least.uses["cpu"].total}, needs)
    assert [(o.quant, o.needs.max_seq_len, o.needs.max_batch_size) for o in found] == [
        ("2", 256, 1)
    ]
    assert offers(variants, {"cpu": 10}, needs) == []


# --- golden plans ---


def starcoder2(layers: int, hidden: int, kv_heads: int, head: bool) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (49152, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors |= {f"{at}.{norm}.weight": (hidden,), f"{at}.{norm}.bias": (hidden,)}
        sizes = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv_heads * 128, hidden),
            "self_attn.v_proj": (kv_heads * 128, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.c_fc": (4 * hidden, hidden), "mlp.c_proj": (hidden, 4 * hidden),
        }  # fmt: skip
        for name, shape in sizes.items():
            tensors |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[:1]}
    tensors |= {"model.norm.weight": (hidden,), "model.norm.bias": (hidden,)}
    return tensors | ({"lm_head.weight": (49152, hidden)} if head else {})


def qwen3_30b_a3b() -> dict[str, tuple[int, ...]]:
    hidden, experts, width = 2048, 128, 768
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151936, hidden)}
    for layer in range(48):
        shapes = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": (128,), "self_attn.k_norm": (128,),
            "self_attn.q_proj": (4096, hidden), "self_attn.k_proj": (512, hidden),
            "self_attn.v_proj": (512, hidden), "self_attn.o_proj": (hidden, 4096),
            "mlp.gate": (experts, hidden), "mlp.experts.gate_proj": (experts, width, hidden),
            "mlp.experts.up_proj": (experts, width, hidden),
            "mlp.experts.down_proj": (experts, hidden, width),
        }  # fmt: skip
        tensors |= {f"model.layers.{layer}.{name}.weight": s for name, s in shapes.items()}
    return tensors | {"model.norm.weight": (hidden,), "lm_head.weight": (151936, hidden)}


MODELS = {
    "3B": (starcoder2(30, 3072, 2, head=False), 3_030_371_328, 30, 2, 4096),
    "7B": (starcoder2(32, 4608, 4, head=False), 7_173_923_840, 32, 4, 4096),
    "15B": (starcoder2(40, 6144, 4, head=True), 15_957_889_024, 40, 4, 4096),
    "30B-A3B": (qwen3_30b_a3b(), 30_532_122_624, 48, 4, None),
}


def sizes_for(model: str, quant: str) -> ModelSizes:
    """As they are in bfloat16, or 4 bits in groups of 64 and 6 outside of the layers."""
    tensors, _, layers, kv_heads, window = MODELS[model]

    def planned(name: str, shape: tuple[int, ...]) -> TensorSize:
        count = math.prod(shape)
        if len(shape) == 1:
            return TensorSize(shape, 4 * count)
        if quant == "bf16":
            return TensorSize(shape, 2 * count)
        bits = 4 if ".layers." in name else 6
        return TensorSize(shape, round(count * (bits + 0.5) / 8), f"q{bits}-g64")

    return sizes_of(
        {name: planned(name, shape) for name, shape in tensors.items()},
        Names("model.layers.", "model.embed_tokens", "lm_head"),
        layers,
        2 * kv_heads * 128 * 4,  # keys and values, float32
        window=window,
        expert_share=8 / 128,
    )


def short(found: Placement) -> str:
    """`cuda:0 0-15, cpu 16-29; head cuda:0`, the embedding too where it is another's."""
    ranges = ", ".join(f"{d} {first}-{last}" for d, first, last in found.devices.ranges())
    outer = f"head {found.head}"
    return f"{ranges}; {outer}" + (f", embed {found.embed}" if found.embed != found.head else "")


@pytest.mark.parametrize("model", MODELS)
def test_the_golden_shapes_are_the_published_models(model: str) -> None:
    tensors, parameters, *_ = MODELS[model]
    assert sum(map(math.prod, tensors.values())) == parameters


MACHINES: tuple[dict[str, float], ...] = (
    {"cuda:0": 8 * GB},
    {"cuda:0": 16 * GB},
    {"cuda:0": 24 * GB},
    {"cuda:0": 24 * GB, "cuda:1": 24 * GB},
)
# With 64 GB of memory beside the cards, and one sequence of 16,384 tokens.
GOLDEN = {
    ("3B", "bf16"): (
        "cuda:0 0-29; head cuda:0",
        "cuda:0 0-29; head cuda:0",
        "cuda:0 0-29; head cuda:0",
        "cuda:0 0-29; head cuda:0",
    ),
    ("3B", "q4"): (
        "cuda:0 0-29; head cuda:0",
        "cuda:0 0-29; head cuda:0",
        "cuda:0 0-29; head cuda:0",
        "cuda:0 0-29; head cuda:0",
    ),
    ("7B", "bf16"): (
        "cuda:0 0-15, cpu 16-31; head cpu",
        "cuda:0 0-31; head cuda:0",
        "cuda:0 0-31; head cuda:0",
        "cuda:0 0-31; head cuda:0",
    ),
    ("7B", "q4"): (
        "cuda:0 0-31; head cuda:0",
        "cuda:0 0-31; head cuda:0",
        "cuda:0 0-31; head cuda:0",
        "cuda:0 0-31; head cuda:0",
    ),
    ("15B", "bf16"): (
        "cuda:0 0-8, cpu 9-39; head cpu",
        "cuda:0 0-18, cpu 19-39; head cpu",
        "cuda:0 0-28, cpu 29-39; head cpu",
        "cuda:0 0-28, cuda:1 29-39; head cuda:1",
    ),
    ("15B", "q4"): (
        "cuda:0 0-28, cpu 29-39; head cuda:0, embed cpu",
        "cuda:0 0-39; head cuda:0",
        "cuda:0 0-39; head cuda:0",
        "cuda:0 0-39; head cuda:0",
    ),
    ("30B-A3B", "bf16"): (
        "cuda:0 0-3, cpu 4-47; head cuda:0",
        "cuda:0 0-9, cpu 10-47; head cuda:0",
        "cuda:0 0-16, cpu 17-47; head cuda:0, embed cpu",
        "cuda:0 0-16, cuda:1 17-33, cpu 34-47; head cuda:0, embed cuda:1",
    ),
    ("30B-A3B", "q4"): (
        "cuda:0 0-15, cpu 16-47; head cuda:0, embed cpu",
        "cuda:0 0-34, cpu 35-47; head cuda:0, embed cpu",
        "cuda:0 0-47; head cuda:0",
        "cuda:0 0-47; head cuda:0",
    ),
}
# Without: the first part that does not fit, None where all does.
ALONE = {
    ("3B", "bf16"): (None, None, None, None),
    ("3B", "q4"): (None, None, None, None),
    ("7B", "bf16"): ("layer 15", None, None, None),
    ("7B", "q4"): (None, None, None, None),
    ("15B", "bf16"): ("layer 8", "layer 18", "layer 28", None),
    ("15B", "q4"): ("layer 29", None, None, None),
    ("30B-A3B", "bf16"): ("layer 5", "layer 11", "layer 17", "layer 34"),
    ("30B-A3B", "q4"): ("layer 16", "layer 35", None, None),
}


@pytest.mark.parametrize("machine", range(4), ids=["8 GB", "16 GB", "24 GB", "2 x 24 GB"])
@pytest.mark.parametrize(("model", "quant"), GOLDEN, ids=" ".join)
def test_golden_plans(model: str, quant: str, machine: int) -> None:
    sizes, cards = sizes_for(model, quant), MACHINES[machine]
    found = plan(sizes, {**cards, "cpu": 64 * GB}, Needs(16384))
    assert short(found) == GOLDEN[model, quant][machine]
    part = ALONE[model, quant][machine]
    if part is None:
        assert {layer.device for layer in plan(sizes, cards, Needs(16384)).layers} <= cards.keys()
        return
    with pytest.raises(DoesNotFitError) as caught:
        plan(sizes, cards, Needs(16384))
    assert caught.value.part == part


@pytest.mark.parametrize(
    ("model", "budgets", "expected"),
    [
        ("15B", {"cpu": 4 * GB}, "cpu 0-7, disk 8-39; head cpu, embed disk"),
        (
            "15B",
            {"cuda:0": 8 * GB, "cpu": 2 * GB},
            "cuda:0 0-28, cpu 29-31, disk 32-39; head cuda:0, embed disk",
        ),
        ("30B-A3B", {"cpu": 6 * GB}, "cpu 0-1, disk 2-47; head cpu, embed disk"),
    ],
)
def test_golden_plans_with_a_disk(model: str, budgets: dict[str, float], expected: str) -> None:
    found = plan(sizes_for(model, "q4"), {**budgets, "disk": math.inf}, Needs(16384))
    assert short(found) == expected


def test_a_shorter_window_or_context_leaves_room_for_layers() -> None:
    sizes, card = sizes_for("15B", "q4"), {"cuda:0": 8.0 * GB, "cpu": 64.0 * GB}

    def on_card(sizes: ModelSizes, length: int, batch: int = 1) -> int:
        layers = plan(sizes, card, Needs(length, batch)).layers
        return sum(layer.device == "cuda:0" for layer in layers)

    assert on_card(sizes, 16384) == on_card(sizes, 8192) == 29
    assert on_card(sizes, 1024) > 29
    assert on_card(sizes, 16384, 4) < 29
    assert on_card(replace(sizes, window=None), 16384) < 29

"""Topology files, device maps and budgets: what they say, and every mistake named at once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starquill.errors import BadRequestError
from starquill.placement.devices import read_budgets, read_device, size_text, slowness
from starquill.placement.maps import DeviceMap, read_device_map, resolve
from starquill.placement.topology import parse_topology, read_organization, read_topology

TEXT = """
"0-1": {quant: 4}
1: {quant: dense}
"/self_attn\\\\.v_proj/": {quant: 8}
"""


def test_entries_match_what_they_name() -> None:
    first, second, third = read_topology(TEXT, 3)
    names = [("model.layers.0.mlp.c_fc.weight", 0), ("model.layers.1.self_attn.v_proj.weight", 1)]
    names.append(("lm_head.weight", None))  # type: ignore[arg-type]
    assert [first.matches(*name) for name in names] == [True, True, False]
    assert [second.matches(*name) for name in names] == [False, True, False]
    assert [third.matches(*name) for name in names] == [False, True, False]
    assert [entry.quant for entry in (first, second, third)] == ["4", "dense", "8"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"0-3": {quant: 4}', "'0-3' is outside of the layers 0 to 2"),
        ('"2-1": {quant: 4}', "'2-1' is outside of the layers"),
        ('"3": {quant: 4}', "'3' is outside"),
        ('"0": {bits: 4}', r"unknown settings bits \(known: quant, device\)"),
        ('"0": 4', "'0' is 4"),
        ('"0": {}', "'0' sets nothing"),
        ('"/(/": {quant: 4}', "bad regular expression"),
        ('"head": {quant: 4}', "'head' names no layers"),
        ('"/mlp/": {device: cpu}', "'/mlp/' cannot have a device"),
        ('"embed": {device: cpu, quant: 4}', "'embed' names no layers"),
        ('"0-3": {device: cpu}', "'0-3' is outside of the layers 0 to 2"),
        ("- 1", r"holds a list \(expected"),
        ("{", "not valid YAML"),
    ],
)
def test_mistakes_are_named(text: str, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        read_topology(text, 3)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(BadRequestError, match=r"'9' is outside.*'x' names no layers"):
        read_topology('"9": {quant: 4}\nx: {quant: 4}', 3)


# --- devices and budgets ---


@pytest.mark.parametrize(
    ("text", "device"),
    [("cpu", "cpu"), (" CUDA ", "cuda:0"), ("cuda:3", "cuda:3"), ("cuda[1]", "cuda:1"),
     ("mps", "mps"), ("disk", "disk"), ("cuda:01", "cuda:1")],
)  # fmt: skip
def test_devices_have_one_spelling(text: str, device: str) -> None:
    assert read_device(text) == device


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cpu:0", "cuda:0:1", "0", "auto"])
def test_other_names_are_no_devices(text: str) -> None:
    assert read_device(text) is None


def test_the_fastest_comes_first() -> None:
    devices = ["disk", "cpu", "cuda:10", "mps", "cuda:2"]
    assert sorted(devices, key=slowness) == ["cuda:2", "cuda:10", "mps", "cpu", "disk"]


def test_budgets() -> None:
    assert read_budgets("cuda=1.5GiB, cpu=16GB,cuda:1=7,mps=2 kb,disk=inf") == {
        "cuda:0": 3 << 29,
        "cpu": 16 * 10**9,
        "cuda:1": 7,
        "mps": 2000,
        "disk": math.inf,
    }


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("gpu=1GB", "'gpu=1GB' names no device (expected cpu, cuda:N, mps, disk)"),
        ("cpu=1G", "'cpu=1G' has no size (expected 10GiB, 500MB or inf)"),
        ("cpu", "'cpu' has no size"),
        ("cpu=-1GB", "'cpu=-1GB' has no size"),
        ("cpu=nan", "'cpu=nan' has no size"),
        ("cuda=1GB,cuda:0=2GB", "cuda:0 is there twice"),
        ("", "'' names no device"),
        ("x=1,cpu=y", "'x=1' names no device (expected cpu, cuda:N, mps, disk), 'cpu=y' has no"),
    ],
)
def test_budgets_that_are_none(text: str, fact: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_budgets(text)
    assert fact in str(caught.value)


def test_sizes_for_people() -> None:
    sizes = (0, 999, 1500, 2_340_000, 16e9, math.inf)
    shown = ["0 B", "999 B", "1.50 kB", "2.34 MB", "16.00 GB", "no limit"]
    assert [size_text(size) for size in sizes] == shown


# --- device maps ---


def _read(text: str, layers: int = 6, tied: bool = False) -> str:
    return str(read_device_map(text, layers, tied=tied))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", "None"),
        ("cpu", "cpu=0-5,embed=cpu,head=cpu"),
        ("cuda", "cuda:0=0-5,embed=cuda:0,head=cuda:0"),
        ("disk", "disk=0-5,embed=disk,head=disk"),
        ("cuda:0=0-2,cuda:1=3,cpu=4-5", "cuda:0=0-2,cuda:1=3-3,cpu=4-5,embed=cuda:0,head=cpu"),
        ("cpu=3-5 , mps = 0-2", "mps=0-2,cpu=3-5,embed=mps,head=cpu"),
        ("cuda=0-3,default=cpu", "cuda:0=0-3,cpu=4-5,embed=cuda:0,head=cpu"),
        ("default=cpu,cuda=2", "cpu=0-1,cuda:0=2-2,cpu=3-5,embed=cpu,head=cpu"),
        ("cpu=0-5,embed=disk,head=cuda", "cpu=0-5,embed=disk,head=cuda:0"),
        ("0:4;1:2", "cuda:0=0-3,cuda:1=4-5,embed=cuda:0,head=cuda:1"),
        ("0:6", "cuda:0=0-5,embed=cuda:0,head=cuda:0"),
        ("1:2;cpu:4", "cuda:1=0-1,cpu=2-5,embed=cuda:1,head=cpu"),
        ("0:0;1:6", "cuda:1=0-5,embed=cuda:1,head=cuda:1"),
    ],
)
def test_maps(text: str, expected: str) -> None:
    assert _read(text) == expected


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cuda:0=0-2,cpu=3-5", "cuda:0"),
        ("cpu=0-2,cuda:0=3-5", "cuda:0"),
        ("cpu=0-2,cuda:0=3-5,embed=cpu", "cpu"),
        ("cuda:0=0-2,cpu=3-5,head=cpu", "cpu"),
        ("cpu=0-5,embed=cuda:1,head=cuda[1]", "cuda:1"),
    ],
)
def test_b62_a_tied_pair_is_on_one_device(text: str, device: str) -> None:
    """B62: the head on one device read a matrix that was on another, or was never loaded."""
    found = read_device_map(text, 6, tied=True)
    assert found is not None
    assert (found.embed, found.head) == (device, device)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("cpu=0-3,cuda:0=3-5", ["layers 3 are in both 'cpu=0-3' and 'cuda:0=3-5'"]),
        ("cpu=0-5,cuda:0=2-3", ["layers 2 to 3 are in both 'cpu=0-5' and 'cuda:0=2-3'"]),
        ("cpu=0-1,cuda:0=4-5", ["layers 2 to 3 have no device (add default=cpu)"]),
        ("cpu=1", ["layers 0 have no device", "layers 2 to 5 have no device"]),
        ("embed=cpu", ["layers 0 to 5 have no device"]),
        ("cpu=0-6", ["'cpu=0-6' passes the last layer, 5, with layers 6"]),
        ("cpu=0-5,cuda=9-12", ["'cuda=9-12' passes the last layer, 5, with layers 9 to 12"]),
        ("cpu=5-0,default=cpu", ["'cpu=5-0' ends before it begins"]),
        ("gpu:0=0-5", ["'gpu:0=0-5' names an unknown device 'gpu:0' (known: cpu, cuda:N, mps"]),
        ("cpu=0-5,head=tpu", ["'head=tpu' names an unknown device 'tpu'"]),
        ("cpu=0-5,head=cpu,head=mps", ["'head=cpu' and 'head=mps' both place head"]),
        ("gpu", ["'gpu' is no device map (expected auto, cpu, cuda:N, mps, disk, or a list of"]),
        ("", ["'' is no device map"]),
        ("cpu=a-b", ["'cpu=a-b' is no device map"]),
        ("cpu=0-5,", ["'' is no device map"]),
        ("0:4;1:4", ["'1:4' passes the last layer, 5, with layers 6 to 7"]),
        ("0:4;1:1", ["layers 5 have no device (add ;cpu:1)"]),
        ("0:3;gpu:3", ["'gpu:3' names an unknown device 'gpu'"]),
        (
            "cpu=0-2,gpu=2-3,cuda:0=8",
            ["'gpu=2-3' names an unknown device", "layers 2 are in both", "'cuda:0=8' passes the"],
        ),
    ],
)
def test_maps_that_are_wrong(text: str, facts: list[str]) -> None:
    """Other engines panic at these or ignore them; here all that is wrong is told at once."""
    with pytest.raises(BadRequestError) as caught:
        _read(text)
    assert str(caught.value).startswith("--device-map: ")
    assert all(fact in str(caught.value) for fact in facts)


def test_b62_a_tied_pair_on_two_devices_is_refused() -> None:
    with pytest.raises(BadRequestError, match="'embed=cpu' and 'head=mps' part what is one matrix"):
        _read("cpu=0-5,embed=cpu,head=mps", tied=True)


@st.composite
def _maps(draw: st.DrawFn) -> DeviceMap:
    device = st.sampled_from(["cpu", "cuda:0", "cuda:1", "mps", "disk"])
    layers = draw(st.lists(device, min_size=1, max_size=12))
    return DeviceMap(tuple(layers), draw(device), draw(device))


@given(_maps())
def test_a_map_reads_back_as_it_was_printed(found: DeviceMap) -> None:
    assert read_device_map(str(found), len(found.layers), tied=False) == found


# --- one file for schemes and devices ---

BOTH = """
"0-2": {quant: 4, device: cuda:0}
"3": {device: "cuda[1]"}
"2-3": {quant: 8}
"/v_proj/": {quant: dense}
embed: {device: cpu}
default: {device: disk}
"""


def test_a_topology_has_devices_and_schemes() -> None:
    found = parse_topology(BOTH, 6)
    assert [(e.target, e.quant) for e in found.quants] == [
        ("0-2", "4"), ("2-3", "8"), ("/v_proj/", "dense"),
    ]  # fmt: skip
    assert found.quants == read_topology(BOTH, 6)
    placed = resolve(found.devices, 6, tied=False, name="t.yaml")
    assert str(placed) == "cuda:0=0-2,cuda:1=3-3,disk=4-5,embed=cpu,head=disk"


def test_devices_of_a_topology_are_checked_like_a_map() -> None:
    text = '"0-3": {device: cpu}\n"3": {device: cuda}\n"5": {device: gpu}'
    with pytest.raises(BadRequestError) as caught:
        resolve(parse_topology(text, 6).devices, 6, tied=False, name="t.yaml")
    assert str(caught.value) == (
        "t.yaml: '5' names an unknown device 'gpu' (known: cpu, cuda:N, mps, disk), "
        "layers 3 are in both '0-3' and '3', layers 4 have no device (add default=cpu)"
    )


def test_the_organization_stands_beside_layers() -> None:
    text = f"quant_organization: moqe\n{TEXT}"
    assert read_organization(text) == "moqe"
    assert read_topology(text, 3) == read_topology(TEXT, 3)
    assert read_organization(TEXT) is None
    with pytest.raises(BadRequestError, match=r"'experts' \(expected default or moqe\)"):
        read_organization("quant_organization: experts")

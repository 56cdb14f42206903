"""`AdapterStore`: rows that keep to themselves, leases, limits, several threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor

from starquill.adapters.store import AdapterLimits, AdapterStore
from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from starquill.errors import AdapterError, BadRequestError, CapacityError
from starquill.kernels.native import native
from tests import tiny
from tests.adapters import making

FOUR = {
    "plain": {"r": 4},
    "dora": {"r": 2, "use_dora": True, "target_modules": ["q_proj", "c_fc", "embed_tokens"]},
    "head": {"r": 3, "target_modules": ["c_proj", "lm_head"], "bias": "none"},
    "whole": {"r": 8, "target_modules": ["q_proj"], "modules_to_save": ["c_fc"]},
}
ROWS: tuple[Mapping[str, float], ...] = (
    {"plain": 1}, {}, {"dora": 1}, {"plain": 0.7, "head": 0.3}, {"head": 1}, {}, {"whole": 1},
    {"plain": 1},
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("adapters")
    return {
        name: making.peft_folder(top / name, seed=seed, **options)[0]
        for seed, (name, options) in enumerate(FOUR.items())
    }


def _store(loaded: LoadedModel, folders: Mapping[str, Path], **limits: int) -> AdapterStore:
    store = AdapterStore(loaded, AdapterLimits(**limits))
    for name, folder in folders.items():
        store.load(name, folder)
    return store


def _run(
    loaded: LoadedModel, store: AdapterStore, rows: Sequence[Mapping[str, float]], steps: int
) -> Tensor:
    """`[steps, N, V]`: prompts one by one, then steps of all together."""
    runner = Runner(loaded, len(rows) * 2)
    leases = [store.lease(row) for row in rows]
    places = [runner.cache.place(40) for _ in rows]
    for lease, place in zip(leases, places, strict=True):
        runner.advance(place, tiny.random_ids(7, seed=9), store.mix_of([lease], [1]))
    mix = store.mix_of(leases, [1] * len(rows))
    out = [runner.decode(places, [[5 + step]] * len(rows), mix) for step in range(steps)]
    for lease in leases:
        lease.release()
    return torch.stack(out)


@pytest.mark.skipif(native is None, reason="torch's own products depend on their company")
@pytest.mark.parametrize("quant", [None, "4"])
def test_a_batch_equals_eight_runs(
    tmp_path: Path, folders: dict[str, Path], quant: str | None
) -> None:
    """Four adapters, a mix and two rows of the base: the same to the bit as each alone."""
    loaded = making.base(tmp_path, quant=quant)
    store = _store(loaded, folders)
    together = _run(loaded, store, ROWS, 3)
    for row, adapters in enumerate(ROWS):
        assert torch.equal(_run(loaded, store, [adapters], 3)[:, 0], together[:, row]), adapters
    never = making.base(tmp_path / "never", quant=quant)
    without = _run(never, AdapterStore(never), [{}], 3)[:, 0]
    assert torch.equal(together[:, 1], without)
    assert torch.equal(together[:, 5], without)
    assert torch.equal(together[:, 0], together[:, 7])
    for row in (0, 2, 3, 4, 6):
        assert float((together[:, row] - without).abs().max()) > 0.05, ROWS[row]


def test_a_base_that_had_adapters_is_the_base(tmp_path: Path, folders: dict[str, Path]) -> None:
    loaded = making.base(tmp_path)
    before = making.logits(loaded)
    store = _store(loaded, folders)
    assert torch.equal(making.logits(loaded), before)
    assert torch.equal(making.logits(loaded, store, {}), before)
    assert torch.equal(making.logits(loaded, store, {"plain": 0.0}), before)
    for name in FOUR:
        store.unload(name)
    assert torch.equal(making.logits(loaded), before)
    assert all(not module.lora.parts for module in loaded.model.modules()
               if getattr(module, "lora", None))  # fmt: skip


def test_weights_are_linear_in_what_an_adapter_adds(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    """The head comes last: there a weight of a half is half of the way."""
    store = AdapterStore(loaded := making.base(tmp_path))
    folder, _ = making.peft_folder(tmp_path / "it", target_modules=["lm_head"])
    store.load("it", folder)
    base, whole, half = (making.logits(loaded, store, {"it": w}) for w in (0, 1, 0.5))
    torch.testing.assert_close(half, (base + whole) / 2, rtol=0, atol=1e-4)


def test_replacing_does_not_disturb_who_runs(tmp_path: Path, folders: dict[str, Path]) -> None:
    loaded = making.base(tmp_path)
    store = AdapterStore(loaded)
    old = store.load("it", folders["plain"])
    expected = making.logits(loaded, store, {"it": 1})
    runner = Runner(loaded, 4)
    with store.lease({"it": 1}) as lease:
        mix = store.mix_of([lease], [1])
        place = runner.cache.place(len(making.IDS))
        first = runner.all_logits(runner.advance(place, making.IDS[:9], mix), mix)
        new = store.load("it", folders["head"])
        assert new.generation > old.generation
        rest = runner.all_logits(runner.advance(place, making.IDS[9:], mix), mix)
        torch.testing.assert_close(torch.cat((first, rest)), expected, rtol=0, atol=1e-5)
        with store.lease({"it": 1}) as newer:
            assert newer.slots != lease.slots
            assert newer.key != lease.key
        store.unload("it")
        assert store.list() == ()
        place = runner.cache.place(len(making.IDS))
        again = runner.all_logits(runner.advance(place, making.IDS, mix), mix)
        assert torch.equal(again, expected)
    assert store.load("next", folders["plain"]).leases == 0
    with store.lease({"next": 1}) as reusing:
        assert reusing.slots == (0,)  # free again once its last lease was released
        lease.release()  # a second time, which counts for nothing
        assert store.list()[0].leases == 1


def test_mixes_are_kept_while_the_batch_is_composed_alike(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    store = _store(making.base(tmp_path), folders)
    one, other = store.lease({"plain": 1}), store.lease({"plain": 1})
    mix = store.mix_of([one, None, other], [1, 2, 1])
    assert mix is not None
    assert mix.slots == one.slots
    assert mix.scales.tolist() == [[1], [0], [0], [1]]
    assert store.mix_of([other, None, one], [1, 2, 1]) is mix
    assert store.mix_of([one, None, other], [1, 1, 1]) is not mix
    assert store.mix_of([None, None], [1, 4]) is None
    mixed = store.mix_of([store.lease({"head": 0.5, "plain": 2}), one], [1, 1])
    assert mixed is not None
    assert mixed.scales.tolist() == [[2, 0.5], [1, 0]]


def test_limits(tmp_path: Path, folders: dict[str, Path]) -> None:
    loaded = making.base(tmp_path)
    store = AdapterStore(loaded, AdapterLimits(count=1))
    store.load("a", folders["plain"])
    store.load("a", folders["head"])  # in its own place
    with pytest.raises(CapacityError, match="no room"):
        store.load("b", folders["plain"])
    assert [info.alias for info in store.list()] == ["a"]
    with pytest.raises(CapacityError, match="rank 4"):
        AdapterStore(loaded, AdapterLimits(rank=3)).load("a", folders["plain"])
    with pytest.raises(CapacityError, match="bytes"):
        AdapterStore(loaded, AdapterLimits(bytes=100)).load("a", folders["plain"])


def test_the_longest_idle_makes_room(tmp_path: Path, folders: dict[str, Path]) -> None:
    store = AdapterStore(making.base(tmp_path), AdapterLimits(count=2, evict=True))
    store.load("a", folders["plain"])
    store.load("b", folders["plain"])
    store.lease({"a": 1}).release()
    store.load("c", folders["plain"])
    assert {info.alias for info in store.list()} == {"a", "c"}
    with store.lease({"a": 1, "c": 1}), pytest.raises(CapacityError, match="no room"):
        store.load("d", folders["plain"])
    store.load("d", folders["plain"])
    assert {info.alias for info in store.list()} == {"c", "d"}


def test_what_cannot_be_leased(tmp_path: Path, folders: dict[str, Path]) -> None:
    store = _store(making.base(tmp_path), {"plain": folders["plain"]})
    with pytest.raises(BadRequestError, match=r"'other' is loaded \(loaded: plain\)"):
        store.lease({"plain": 1, "other": 1})
    with pytest.raises(BadRequestError, match="weight nan"):
        store.lease({"plain": float("nan")})
    with pytest.raises(BadRequestError, match="no adapter"):
        store.unload("other")
    assert store.list()[0].leases == 0


def test_a_failed_load_leaves_all_as_it_was(tmp_path: Path, folders: dict[str, Path]) -> None:
    store = AdapterStore(loaded := making.base(tmp_path))
    store.load("it", folders["plain"])
    expected = making.logits(loaded, store, {"it": 1})
    with pytest.raises(AdapterError):
        store.load("it", tmp_path / "nothing")
    assert torch.equal(making.logits(loaded, store, {"it": 1}), expected)


def test_several_threads(tmp_path: Path, folders: dict[str, Path]) -> None:
    """One computes while others load, replace and unload; it always gets the same."""
    loaded = making.base(tmp_path)
    store = _store(loaded, {"plain": folders["plain"]})
    expected, failures = making.logits(loaded, store, {"plain": 1}), []

    def churn(alias: str) -> None:
        try:
            for _ in range(5):
                store.load(alias, folders["head"])
                store.load(alias, folders["dora"])
                store.unload(alias)
        except Exception as error:
            failures.append(error)

    threads = [Thread(target=churn, args=(alias,)) for alias in ("x", "y")]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert torch.equal(making.logits(loaded, store, {"plain": 1}), expected)
    for thread in threads:
        thread.join()
    assert failures == []
    assert [info.alias for info in store.list()] == ["plain"]

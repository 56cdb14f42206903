"""Steps that are run again from what was written down are the model's own, to the last bit."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starquill.engine import replay
from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from starquill.kernels import program
from starquill.kernels.native import native
from starquill.kernels.program import Program
from starquill.loading import load
from starquill.models.spec import StepBatch
from starquill.nn.lora import AdapterMix
from tests import moe, tiny
from tests.adapters import making

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

STEPS = 70  # over the end of a block


class _Runs:
    """How many steps were run from a program."""

    count = 0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Runs]:
    found, run = _Runs(), Program.run

    def counted(self: Program, values: Any) -> None:
        found.count += 1
        run(self, values)

    monkeypatch.setattr(Program, "run", counted)
    return found


def _plain(runner: Runner) -> Runner:
    """The same without programs."""

    class Plain:
        def hidden(self, batch: StepBatch) -> Tensor:
            hidden: Tensor = runner.loaded.model.hidden(batch)
            return hidden

    runner._replay = Plain()  # type: ignore[assignment]
    return runner


def _decoded(
    runner: Runner, rows: Sequence[int], mix: AdapterMix | None = None, steps: int = STEPS
) -> list[Tensor]:
    """Logits of `steps` steps of sequences with prompts of `rows` tokens."""
    places = [runner.cache.place(200) for _ in rows]
    for place, count in zip(places, rows, strict=True):
        runner.prefill(place, tiny.random_ids(count))
    ids = tiny.random_ids(steps * len(rows), seed=3)
    return [
        runner.decode(places, [[ids[step * len(rows) + row]] for row in range(len(rows))], mix)
        for step in range(steps)
    ]


def _same(loaded: LoadedModel, rows: Sequence[int], mix: AdapterMix | None = None) -> None:
    ours = _decoded(Runner(loaded, 40), rows, mix)
    theirs = _decoded(_plain(Runner(loaded, 40)), rows, mix)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _mixture(folder: Path, family: str, **changes: Any) -> Path:
    raw = moe.config(family, max_position_embeddings=256, **changes)
    return moe.write(folder, raw, moe.reference(raw))


@pytest.mark.parametrize("rows", [[5], [5, 30, 1]])
@pytest.mark.parametrize("quant", [None, "4-g32", "2-g32"])
def test_starcoder2(tmp_path: Path, runs: _Runs, quant: str | None, rows: list[int]) -> None:
    raw = tiny.config(max_position_embeddings=256)
    loaded = load(tiny.write_checkpoint(tmp_path, raw), quant=quant)
    _same(loaded, rows)
    assert runs.count == STEPS - 1


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("olmoe", {"clip_qkv": None}),
        ("phimoe", {}),
        ("starcoder2_moe", {}),
    ],
)
def test_mixtures(tmp_path: Path, runs: _Runs, family: str, changes: dict[str, Any]) -> None:
    _same(load(_mixture(tmp_path, family, **changes), quant="4-g32"), [5, 30, 1])
    assert runs.count == STEPS - 1


@pytest.mark.parametrize(("family", "quant"), [("olmoe", "4-g32"), ("mixtral", None)])
def test_where_torch_has_a_part_the_model_runs_itself(
    tmp_path: Path, runs: _Runs, caplog: pytest.LogCaptureFixture, family: str, quant: str | None
) -> None:
    with caplog.at_level(logging.DEBUG, "starquill"):
        _same(load(_mixture(tmp_path, family), quant=quant), [5, 30])
    assert runs.count == 0
    assert len([r for r in caplog.records if "not written down" in r.message]) == 7  # 1, 2... 64


def test_adapters(tmp_path: Path, runs: _Runs) -> None:
    """Three ways in one batch, while another adapter comes and goes."""
    folders = [
        making.peft_folder(tmp_path / name, seed=seed, r=4, target_modules=making.ALL)[0]
        for seed, name in enumerate("abc")
    ]
    raw = tiny.config(max_position_embeddings=256)
    loaded = load(tiny.write_checkpoint(tmp_path / "base", raw), quant="4-g32")
    store = loaded.adapters
    for name, folder in zip("ab", folders, strict=False):
        store.load(name, folder)
    leases = [store.lease({"a": 1.0}), None, store.lease({"a": 0.3, "b": 0.7})]
    mix = store.mix_of(leases, [1, 1, 1])
    _same(loaded, [5, 30, 1], mix)
    assert runs.count == STEPS - 2  # the first makes adapters' plans
    runner, plain = Runner(loaded, 100), _plain(Runner(loaded, 100))
    before = _decoded(runner, [5, 30, 1], mix, 4)
    store.load("c", folders[2])
    store.unload("c")
    after = _decoded(runner, [5, 30, 1], mix, 4)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for other in (None, store.mix_of([store.lease({"b": 1.0})] * 3, [1, 1, 1])):
        ours, theirs = (_decoded(r, [5, 30, 1], other, 4) for r in (runner, plain))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_programs_go_with_their_mix(tmp_path: Path) -> None:
    folder = making.peft_folder(tmp_path / "a", seed=0, r=4)[0]
    loaded = making.base(tmp_path)
    loaded.adapters.load("a", folder)
    with loaded.adapters.lease({"a": 1.0}) as lease:
        runner = Runner(loaded, 40)
        place = runner.cache.place(50)
        runner.prefill(place, tiny.random_ids(5))
        for _ in range(3):
            runner.decode([place], [[7]], loaded.adapters.mix_of([lease], [1]))
        assert len(runner._replay._known) == 1
    loaded.adapters.unload("a")
    assert len(runner._replay._known) == 0


def test_other_weights_are_seen_at_once(tmp_path: Path, runs: _Runs) -> None:
    raw = tiny.config(max_position_embeddings=256)
    folder = tiny.write_checkpoint(tmp_path, raw)
    loaded = load(folder, quant="4-g32")
    runner = Runner(loaded, 40)
    before = _decoded(runner, [5], steps=4)
    loaded.requantize("3-g32")
    after = _decoded(runner, [5], steps=4)
    fresh = _decoded(_plain(Runner(load(folder, quant="3-g32"), 40)), [5], steps=4)
    assert all(torch.equal(a, b) for a, b in zip(after, fresh, strict=True))
    assert not torch.equal(before[-1], after[-1])
    assert runs.count == 6


def test_shapes_are_forgotten_the_oldest_first(
    tmp_path: Path, runs: _Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MOST_SHAPES", 16)
    loaded = load(tiny.write_checkpoint(tmp_path, tiny.config(max_position_embeddings=256)))
    runner = Runner(loaded, 1200)
    for count in range(1, 20):
        _decoded(runner, [3] * count, steps=2)
    runs.count = 0
    _decoded(runner, [3] * 19, steps=1)
    assert runs.count == 1
    _decoded(runner, [3], steps=1)
    assert runs.count == 1


def test_programs_of_many_shapes_share_their_memory(tmp_path: Path) -> None:
    def taken(most: int) -> int:
        runner = Runner(loaded, 4 * most * (most + 1))
        for count in range(1, most + 1):
            _decoded(runner, [3] * count, steps=2)
        return sum(size * len(free) for size, free in runner._replay._arena._free.items())

    loaded = load(tiny.write_checkpoint(tmp_path, tiny.config(max_position_embeddings=256)))
    assert taken(24) < 2.5 * taken(12)
    assert taken(12) < 2.5 * 12 * taken(1)


def test_weights_that_change_twice_at_once(tmp_path: Path, runs: _Runs) -> None:
    """Two threads requantize while a third steps: no program runs over weights that are gone."""
    raw = tiny.config(max_position_embeddings=256, num_hidden_layers=4)
    loaded = load(tiny.write_checkpoint(tmp_path, raw), quant="4-g32")
    possible = {
        quant: _decoded(_plain(Runner(load(tmp_path, quant=quant), 40)), [5], steps=1)[0]
        for quant in ("4-g32", "8-g32")
    }
    threads = [
        threading.Thread(target=lambda q=q: [loaded.requantize(q) for _ in range(25)])
        for q in possible
    ]
    runner = Runner(loaded, 40)
    place = runner.cache.place(200)
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        place.length = 0
        assert runner.decode([place], [[7]]).abs().max() < 1e3
    for thread in threads:
        thread.join()
    found = _decoded(Runner(loaded, 40), [5], steps=1)[0]
    assert any(torch.equal(found, logits) for logits in possible.values())


def test_a_requantizing_that_was_interrupted(
    tmp_path: Path, runs: _Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny.write_checkpoint(tmp_path, tiny.config()), quant="4-g32")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("starquill.requantizing.assign", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loaded.requantize("8-g32")
    assert loaded.weights_version % 2 == 0
    _decoded(Runner(loaded, 40), [5], steps=4)
    assert runs.count == 3


def test_other_threads_leave_what_a_program_points_to(tmp_path: Path) -> None:
    """Another runner's prompt with the same adapter, in the middle of a step written down."""
    folder = making.peft_folder(tmp_path / "a", seed=0, r=4, target_modules=making.ALL)[0]
    raw = tiny.config(max_position_embeddings=256)
    loaded = load(tiny.write_checkpoint(tmp_path / "base", raw), quant="4-g32")
    loaded.adapters.load("a", folder)
    mix = loaded.adapters.mix_of([loaded.adapters.lease({"a": 1.0})], [1])
    ours, other, plain = Runner(loaded, 40), Runner(loaded, 40), _plain(Runner(loaded, 40))
    last = loaded.model.model.layers[-1]
    feed, elsewhere = last.feed, other.cache.place(200)
    plans: list[weakref.ref[Any]] = []

    def while_fed(x: Tensor, step: Any) -> Tensor:
        if threading.current_thread() is threading.main_thread() and _is_recording():
            plans[:] = [weakref.ref(plan) for key, plan in mix.plans.items() if key[1]]
            prompt = tiny.random_ids(7)
            beside = threading.Thread(target=other.advance, args=(elsewhere, prompt, mix))
            beside.start()
            beside.join()
        return feed(x, step)

    last.feed = while_fed
    found = _decoded(ours, [5], mix, steps=6)
    assert elsewhere.length > 0
    gc.collect()
    mix.plans.clear()
    assert len(plans) >= 11
    assert all(plan() is not None for plan in plans)
    expected = _decoded(plain, [5], mix, steps=6)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _is_recording() -> bool:
    return program._recorder.program is not None


def test_a_prompt_between_two_steps_does_not_matter(tmp_path: Path, runs: _Runs) -> None:
    """The plans of its pieces are kept beside those of steps."""
    folder = making.peft_folder(tmp_path / "a", seed=0, r=4)[0]
    loaded = making.base(tmp_path)
    loaded.adapters.load("a", folder)
    mix = loaded.adapters.mix_of([loaded.adapters.lease({"a": 1.0})], [1])
    runner = Runner(loaded, 40)
    place, other = runner.cache.place(50), runner.cache.place(50)
    for _ in range(4):
        runner.decode([place], [[7]], mix)
        runner.advance(other, tiny.random_ids(5), mix)
    assert runs.count == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_runs_on(tmp_path: Path) -> None:
    """Forked while another thread is in the middle of a step."""
    torch.set_num_threads(1)
    loaded = load(tiny.write_checkpoint(tmp_path, tiny.config()))
    reached, go_on = threading.Event(), threading.Event()
    embed, parent = loaded.model.embed, threading.main_thread()

    def held(ids: Tensor, mix: Any = None) -> Tensor:
        if threading.current_thread() is not parent and ids.shape[1] == 1:
            reached.set()
            assert go_on.wait(60)
        return embed(ids, mix)

    loaded.model.embed = held
    beside = threading.Thread(target=_decoded, args=(Runner(loaded, 40), [5], None, 1))
    beside.start()
    assert reached.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        _decoded(Runner(loaded, 40), [5], steps=4)
        os._exit(7)
    found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    go_on.set()
    beside.join()
    assert found == 7

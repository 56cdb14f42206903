"""`train`: from a base, experts and labelled texts to a mixture's folder; `join`: from gates."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor

from starquill.anymoe.config import (
    AnyMoeConfig,
    OnProgress,
    TrainProgress,
    TrainReport,
    check_names,
)
from starquill.anymoe.course import Course, Lessons, judge
from starquill.anymoe.experts import Adapted, Base, Expert, open_base, open_experts
from starquill.anymoe.folder import (
    REFERENCE,
    Mixture,
    check_delta,
    read_reference,
    write_mixture,
    write_reference,
)
from starquill.anymoe.gates import GATE_FILE, Gates, read_gates
from starquill.anymoe.reports import write_report
from starquill.anymoe.rows import Row, Split, read_rows, split_rows
from starquill.anymoe.states import Pass, costs, open_states, state_shape, write_states
from starquill.checkpoint.files import write_atomically
from starquill.checkpoint.save import new_folder
from starquill.errors import BadRequestError, StarquillError

log = logging.getLogger("starquill")

_SAVE_EVERY = 5.0  # seconds


def _silent(_: TrainProgress) -> None:
    pass


def train(
    base: str | Path,
    experts: Mapping[str, str | Path],
    data: str | Path,
    out: str | Path,
    config: AnyMoeConfig = AnyMoeConfig(),  # noqa: B008  # it is frozen
    *,
    on_progress: OnProgress = _silent,
) -> TrainReport:
    """Train gates that choose between `base` and `experts`, and write the mixture to `out`.

    `experts` are checkpoints of the base's architecture or LoRA folders, by name; their order is
    that of the numbers in `data`, from 1 on. The base's weights are not changed. A run that was
    interrupted goes on where it was, if it is started again as it was.
    Raises StarquillError before anything is written to `out`, which is then complete or not there.
    """
    out, names = Path(out), check_names(experts)
    config.check(len(experts))
    _check_new(out)
    rows = read_rows(Path(data), names, labelled=config.objective == "label")
    opened = open_base(base)
    layers = config.chosen(opened.config.num_hidden_layers)
    found = open_experts(opened, experts, layers)
    if config.lora_experts == "delta":
        check_delta(found)
    rows, texts = _encoded(opened, rows, config.tokens)
    run = Pass(opened, found, layers, texts)
    with _Desk.at(out, run, experts, rows, config) as desk:
        lessons, rows = _lessons(run, rows, config, desk, on_progress)
        split = split_rows(rows, config.held_out, config.seed)
        course = _train(run, lessons, split, config, desk=desk, on_progress=on_progress)
        assert course.best_gates is not None
        sources = {name: str(place) for name, place in experts.items()}
        delta = config.lora_experts == "delta"
        mixture = Mixture(
            opened, found, sources, course.best_gates, config.top_k, delta, config.gate
        )
        report = _report(out, mixture, course, lessons, split)
        with new_folder(out) as folder:
            _write(mixture, folder, config.bundle, on_progress)
            write_report(report, course.history, folder)
    return report


def join(
    gates: str | Path,
    out: str | Path,
    base: str | Path | None = None,
    experts: Mapping[str, str | Path] | None = None,
    config: AnyMoeConfig = AnyMoeConfig(),  # noqa: B008  # it is frozen
) -> Path:
    """Write the model that `gates` belong to, to the new folder `out`.

    `gates` is a folder that `train` wrote without `bundle`, or a `gate.safetensors` as mistral.rs
    writes it; then `base` and `experts` say what it chooses between.
    """
    gates, out = Path(gates), Path(out)
    _check_new(out)
    if (gates / REFERENCE).is_file():
        if base is not None or experts:
            raise BadRequestError(f"{gates} names its base and experts itself; leave them out")
        reference = read_reference(gates)
        base, experts, config = reference.base, reference.experts, reference.config
        gates = gates / GATE_FILE
    if base is None or not experts:
        raise BadRequestError(
            f"{gates} does not say what it chooses between: name base and experts"
        )
    check_names(experts)
    config.check(len(experts))
    opened = open_base(base)
    layers = config.chosen(opened.config.num_hidden_layers)
    read = read_gates(gates, layers, len(experts) + 1, opened.config.hidden_size)
    return write(opened, experts, read, out, config)


def write(
    base: Base,
    experts: Mapping[str, str | Path],
    gates: Gates,
    out: Path,
    config: AnyMoeConfig = AnyMoeConfig(),  # noqa: B008  # it is frozen
) -> Path:
    """Write the mixture of `base` and `experts` with `gates` that are there already."""
    found = open_experts(base, experts, gates.layers)
    _warn(found)
    delta = config.lora_experts == "delta"
    if delta:
        check_delta(found)
    sources = {name: str(place) for name, place in experts.items()}
    with new_folder(out) as folder:
        mixture = Mixture(base, found, sources, gates, config.top_k, delta, config.gate)
        write_mixture(mixture, folder)
    return out


def _check_new(out: Path) -> None:
    """Told at once, not after the training."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadRequestError(f"{out} exists already; name a new folder")


def _warn(experts: Sequence[Expert]) -> tuple[str, ...]:
    warnings = tuple(w for e in experts if isinstance(e, Adapted) for w in e.warnings)
    for warning in warnings:
        log.warning("%s", warning)
    return warnings


def _encoded(base: Base, rows: Sequence[Row], most: int) -> tuple[list[Row], list[list[int]]]:
    """Rows and the token ids of each, at most `most`; a row without two tokens is none."""
    tokenizer, config = base.checkpoint.tokenizer, base.config
    assert tokenizer is not None
    most = min(most, config.context_length)
    texts = [tokenizer.encode(row.prompt)[:most] for row in rows]
    if short := [row.group for row, text in zip(rows, texts, strict=True) if len(text) < 2]:
        raise BadRequestError(f"{short[0]} is a single token (expected a prompt of two or more)")
    if max(max(text) for text in texts) >= config.vocab_size:
        raise BadRequestError("the base's tokenizer has tokens that the model does not have")
    return list(rows), texts


@dataclass(frozen=True)
class _Desk:
    """A folder beside `out` for what is needed to go on; kept when a run is interrupted."""

    folder: Path

    @classmethod
    def at(
        cls,
        out: Path,
        run: Pass,
        experts: Mapping[str, str | Path],
        rows: Sequence[Row],
        config: AnyMoeConfig,
    ) -> _Desk:
        """What was made for another run is thrown away."""
        said = json.dumps(
            [
                asdict(replace(config, layers=tuple(run.layers))),
                [(str(run.base.checkpoint.folder), *_stamps(run.base.checkpoint.folder))],
                [(name, str(path), *_stamps(Path(path))) for name, path in experts.items()],
                [(row.expert, row.group, text) for row, text in zip(rows, run.texts, strict=True)],
            ],
            default=str,
        )
        key = hashlib.sha256(said.encode()).hexdigest()
        folder = out.parent / f".{out.name}.training"
        if folder.exists() and _text_of(folder / "key") != key:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "key").write_text(key)
        return cls(folder)

    def __enter__(self) -> _Desk:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A mistake of the user's would come again; an interrupted run is gone on with.
        if kind is None or issubclass(kind, StarquillError):
            shutil.rmtree(self.folder, ignore_errors=True)


def _text_of(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Sizes and times of a model's files: a changed expert is another."""
    paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found = [(p.name, p.stat()) for p in paths if p.exists()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _lessons(
    run: Pass, rows: list[Row], config: AnyMoeConfig, desk: _Desk, on_progress: OnProgress
) -> tuple[Lessons, list[Row]]:
    """Hidden states from the desk, or computed; for `lm` rows get the expert that predicts best."""
    path = desk.folder / "hidden.bin"
    count, is_lm = len(run.experts), config.objective == "lm"
    total = run.base.config.num_hidden_layers * (count + 1 if is_lm else 1)
    done = 0

    def on_layer() -> None:
        nonlocal done
        done += 1
        on_progress(TrainProgress("reading", done, total))

    table: list[Tensor] | None = None
    if is_lm:
        losses = _losses(run, desk.folder / "losses.safetensors", on_layer)
        best, table = costs(losses)
        rows = [replace(row, expert=expert) for row, expert in zip(rows, best, strict=True)]
    labels = [row.expert or 0 for row in rows]
    if path.exists():
        states = open_states(path, state_shape(run.base, run.layers, run.texts), run.texts)
    else:
        states = write_states(run, labels, path, on_layer)
    return Lessons(states, labels, table, count), rows


def _losses(run: Pass, path: Path, on_layer: Callable[[], None]) -> list[list[Tensor]]:
    """By expert and row, from `path` or computed."""
    count, rows = len(run.experts), len(run.texts)
    if not path.exists():
        found = [run.losses([e] * rows, on_layer) for e in range(count)]
        flat = {f"{e}-{r}": t.clone() for e, row in enumerate(found) for r, t in enumerate(row)}
        write_atomically(path, save(flat))
    kept = load_file(path)
    return [[kept[f"{e}-{r}"] for r in range(rows)] for e in range(count)]


def _train(
    run: Pass,
    lessons: Lessons,
    split: Split,
    config: AnyMoeConfig,
    *,
    desk: _Desk,
    on_progress: OnProgress,
) -> Course:
    saved = desk.folder / "course.pt"
    width = run.base.config.hidden_size
    course = Course.begin(run.layers, lessons.experts, width, config.learning_rate)
    if saved.exists():
        course.resume(saved)
    last = time.monotonic()

    def on_epoch(course: Course) -> None:
        nonlocal last
        if time.monotonic() - last > _SAVE_EVERY:
            course.save(saved)
            last = time.monotonic()
        entry = course.history[-1]
        right = entry.get("accuracy")
        note = f"loss {entry['loss']:.3f}" if right is None else f"{right:.1%} right"
        on_progress(TrainProgress("training", course.epoch, config.epochs, note))

    try:
        course.run(lessons, split, config, on_epoch)
    except BaseException:
        course.save(saved)
        raise
    return course


def _report(
    out: Path, mixture: Mixture, course: Course, lessons: Lessons, split: Split
) -> TrainReport:
    assert course.best_gates is not None
    rows = split.held_out or split.training
    found = judge(course.best_gates, lessons, rows, pooled=mixture.gate == "mean")
    experts = len(mixture.experts)
    warnings = _warn(mixture.experts)
    if not split.held_out:
        warnings += ("no rows were held out: nothing says how the gates do on other code",)
    return TrainReport(
        out=out,
        experts=tuple(mixture.names),
        layers=mixture.gates.layers,
        epochs=course.epoch,
        best_epoch=course.best_epoch,
        rows=len(lessons.labels),
        held_out=len(split.held_out),
        loss=course.best,
        accuracy=found.accuracy,
        token_accuracy=found.token_accuracy,
        by_layer=found.by_layer,
        by_expert=found.by_expert(experts),
        confusion=found.confusion(experts),
        shares=found.shares,
        warnings=warnings,
    )


def _write(mixture: Mixture, folder: Path, bundle: bool, on_progress: OnProgress) -> None:
    done, total = 0, len(mixture.gates.layers)

    def on_layer() -> None:
        nonlocal done
        done += 1
        on_progress(TrainProgress("writing", done, total))

    if bundle:
        write_mixture(mixture, folder, on_layer)
    else:
        write_reference(mixture, folder)

"""What quantization costs, by scheme and beside llama.cpp's types: a table and a picture.

    python benchmarks/quantization.py --data FILE|DIR --calibrate FILE|DIR
        [--llama-python PYTHON] [--table FILE.md] [--plot FILE.png]

Every row has all matrices in one type, embedding and head included, so that bits per weight are
comparable; they are counted from what is stored. All rows are scored by the same code against the
unquantized model. `--llama-python` is an interpreter with `llama-cpp-python`, which then writes
GGUF files, without and with importances from the same calibration text. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import gguf_file
import numpy as np

from starquill.checkpoint.files import read_texts
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import open_checkpoint
from starquill.engine.loaded import LoadedModel
from starquill.engine.scoring import score_texts
from starquill.loading import load
from starquill.nn.linear import Embedding, Linear
from starquill.quantizing import QuantOptions, plan_checkpoint

# None of ours is larger than llama.cpp's type of as many bits.
SCHEMES = ("q8-g64", "q6-g64", "q5-g64", "q4-g64", "q3-g128", "q2-g64")
METHODS = ("rtn", "hqq", "hqq+calibration")
TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q3_K", "Q2_K")
HEAD = """\
| bits per weight | type | how | bits per byte | over float32 | KL (nats) | same top token |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Candidate:
    """A quantized model, and what it is called."""

    method: str
    type: str
    bits_per_weight: float
    loaded: LoadedModel


@dataclass(frozen=True)
class Row:
    """A candidate's scores."""

    method: str
    type: str
    bits_per_weight: float
    bits_per_byte: float
    kl: float
    top: float

    def markdown(self, dense: float) -> str:
        worse, same = self.bits_per_byte / dense - 1, 100 * self.top
        return (
            f"| {self.bits_per_weight:.3f} | {self.type} | {self.method} "
            f"| {self.bits_per_byte:.4f} | {100 * worse:+.2f} % | {self.kl:.4f} | {same:.1f} % |"
        )


def matrices(loaded: LoadedModel) -> dict[str, Linear | Embedding]:
    """The modules that hold a matrix, by name; a tied one comes twice."""
    modules = loaded.model.named_modules()
    return {name: m for name, m in modules if isinstance(m, Linear | Embedding)}


def bits_per_weight(loaded: LoadedModel) -> float:
    """Over all matrices; a tied one counts once."""
    weights = {id(m.weight): m.weight for m in matrices(loaded).values()}.values()
    return 8 * sum(w.nbytes for w in weights) / sum(int(np.prod(w.shape)) for w in weights)


def ours(model: str, calibrate: Path) -> Iterator[Candidate]:
    for scheme in SCHEMES:
        for method in METHODS:
            name, told = method.partition("+")[0], "+" in method
            everywhere = f".={scheme}-{name}"  # embedding and head too
            options = QuantOptions(
                scheme, overrides=(everywhere,), calibrate=calibrate if told else None
            )
            loaded = load(model, quant=options, exact=True)
            yield Candidate(method, scheme, bits_per_weight(loaded), loaded)


def squares(model: str, calibrate: Path) -> Mapping[str, np.ndarray]:
    """Mean squares of each matrix's inputs by GGUF's names."""
    checkpoint = open_checkpoint(locate(model, None))
    plan = plan_checkpoint(checkpoint, QuantOptions("4-rtn", calibrate=calibrate))
    return {gguf_file.gguf_name(name): x.numpy() for name, x in plan.importances.items()}


def theirs(model: str, calibrate: Path, python: str) -> Iterator[Candidate]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = gguf_file.write_gguf(model, folder / "source.gguf")
        told = folder / "squares.npz"
        np.savez(told, **squares(model, calibrate))  # type: ignore[arg-type]
        script = str(Path(__file__).parent / "gguf_types.py")
        for method in ("llama.cpp", "llama.cpp+imatrix"):
            out = folder / method
            out.mkdir()
            # Types above 4 bits gain next to nothing from importances.
            types = TYPES if method == "llama.cpp" else ("Q4_K", "Q3_K", "Q2_K")
            command = [python, script, "--source", str(source), "--out", str(out)]
            extra = [] if method == "llama.cpp" else ["--squares", str(told)]
            subprocess.run([*command, "--types", *types, *extra], check=True)
            for kind in types:
                yield gguf_candidate(model, out / f"{kind}.gguf", method, kind)


def gguf_candidate(model: str, path: Path, method: str, kind: str) -> Candidate:
    """`model` with the file's matrices: GGUF has no key for its sliding window."""
    stored = [t for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1]
    used = sorted({t.tensor_type.name for t in stored})
    size = 8 * sum(int(t.n_bytes) for t in stored) / sum(int(np.prod(t.shape)) for t in stored)
    loaded, read = load(model), matrices(load(path))
    for name, module in matrices(loaded).items():
        module.weight = read[name].weight
    label = kind if used == [kind] else f"{kind} ({', '.join(used)})"
    return Candidate(method, label, size, loaded)


def plot(rows: Iterable[Row], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    rows = sorted(rows, key=lambda row: row.bits_per_weight)
    for method in dict.fromkeys((*METHODS, *(row.method for row in rows))):
        # Q4_0 is off llama.cpp's curve of K-quants.
        own = [row for row in rows if row.method == method and row.type != "Q4_0"]
        axes.plot(
            [row.bits_per_weight for row in own],
            [row.kl for row in own],
            marker="o",
            label=method,
            linestyle="--" if method.startswith("llama.cpp") else "-",
        )
    axes.set(yscale="log", xlabel="bits per weight, embedding and head included")
    axes.set_ylabel("KL divergence from float32 (nats per token)")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--llama-python")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    logging.getLogger("starquill").setLevel(logging.ERROR)  # of sliding windows; see above
    texts = read_texts(options.data, ".py")
    reference = load(options.model)
    dense = score_texts(reference, texts).bits_per_byte
    candidates = ours(options.model, options.calibrate)
    rows = score(candidates, texts, reference, dense)
    if options.llama_python is not None:
        candidates = theirs(options.model, options.calibrate, options.llama_python)
        rows += score(candidates, texts, reference, dense)
    rows.sort(key=lambda row: (-row.bits_per_weight, row.kl))
    table = "\n".join((HEAD, *(row.markdown(dense) for row in rows)))
    print(f"\n{table}")
    if options.table is not None:
        options.table.write_text(f"{table}\n", encoding="utf-8")
    if options.plot is not None:
        plot(rows, options.plot)
    found = {"benchmark": "quantization", "float32": dense, "rows": [vars(row) for row in rows]}
    print(json.dumps(found))


def score(
    candidates: Iterable[Candidate], texts: list[str], reference: LoadedModel, dense: float
) -> list[Row]:
    rows = []
    for each in candidates:
        found = score_texts(each.loaded, texts, reference)
        scores = (found.bits_per_byte, found.kl_divergence, found.top_agreement)
        size = round(each.bits_per_weight, 4)
        rows.append(Row(each.method, each.type, size, *(round(x, 5) for x in scores)))
        print(rows[-1].markdown(dense), flush=True)
    return rows


if __name__ == "__main__":
    main()

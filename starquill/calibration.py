"""How much each input of each matrix matters: second moments of activations on real text.

The model is run one layer at a time, so that it need not fit into memory; or the moments come
from llama.cpp's importance matrix.
"""

from __future__ import annotations

import logging
import math
import re
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from starquill.checkpoint.build import assign, compare
from starquill.checkpoint.opening import Checkpoint
from starquill.checkpoint.source import WeightSource
from starquill.errors import (
    BadRequestError,
    CheckpointError,
    NumericsError,
    UnsupportedError,
    listing,
)
from starquill.models.spec import GgufNames, ModelParts, StepBatch
from starquill.nn.cache import CacheShape, KvCache, blocks_for
from starquill.quant.feedback import block_width
from starquill.quant.weight import Computing

log = logging.getLogger("starquill")

Importances = Mapping[str, Tensor]


@dataclass(frozen=True)
class Moments:
    """By weight name: mean squares `[in]` or `[E, in]` of inputs; of some, products in blocks.

    `products` are `[in/n, n, n]`, or `[E, in/n, n, n]`: means of x xᵀ within each run of n inputs.
    `unseen` are the experts of a stack that had too few tokens to tell; their squares are ones.
    """

    squares: Mapping[str, Tensor]
    products: Mapping[str, Tensor]
    unseen: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def after(self, other: Moments) -> Moments:
        """Those of `other` and these."""
        return Moments(
            {**other.squares, **self.squares},
            {**other.products, **self.products},
            {**other.unseen, **self.unseen},
        )


TOKENS = 32_768
_LEAST_SHARE = 256  # tokens of one text; with fewer, its beginning is all that is seen
_MOST_CHARACTERS = 32  # of a token on average, so that a long text is not encoded whole
_CHUNK = 512
# Of so few tokens an expert's moments are chance: it is quantized without.
FEWEST_TOKENS = 16
# Products of a stack of many experts would take more memory than its layer.
_MOST_PRODUCTS = 256 << 20  # bytes


def cut(
    texts: Sequence[str], encode: Callable[[str], list[int]], context: int, budget: int = TOKENS
) -> list[list[int]]:
    """Token ids of the beginnings of `texts`: `budget` in all, spread as evenly as they allow.

    Of very many texts some are taken, evenly spaced; a long one is cut to pieces of `context`.
    """
    texts = [text for text in texts if text]
    most = max(1, budget // _LEAST_SHARE)
    if len(texts) > most:
        texts = [texts[i * len(texts) // most] for i in range(most)]
    found: list[list[int]] = []
    left = budget
    # Shortest first: what a short text leaves of its share goes to those after it.
    for number, text in enumerate(sorted(texts, key=len)):
        share = left // (len(texts) - number)
        ids = encode(text[: share * _MOST_CHARACTERS])[:share]
        found += [ids[start : start + context] for start in range(0, len(ids), context)]
        left -= len(ids)
    return found


class _Products:
    """Adds up x xᵀ within blocks of inputs; of a stack, for each expert."""

    def __init__(self, shape: Sequence[int]) -> None:
        *lead, _, width = shape
        self._block = block_width(width)
        self._sums = torch.zeros(*lead, width // self._block, self._block, self._block)

    @classmethod
    def of(cls, shape: Sequence[int]) -> _Products | None:
        """None for a matrix that has no blocks, or a stack of too many."""
        *lead, _, width = shape
        block = block_width(width)
        size = 4 * math.prod(lead) * width * block
        return None if block == 0 or (lead and size > _MOST_PRODUCTS) else cls(shape)

    def add(self, x: Tensor) -> None:
        """`x` is `[N, in]`."""
        self._add(self._sums, x)

    def add_grouped(self, x: Tensor, counts: Sequence[int]) -> None:
        """`x` is `[N, in]` in the order of its experts."""
        for expert, rows in enumerate(x.split(list(counts))):
            if len(rows):
                self._add(self._sums[expert], rows)

    def _add(self, sums: Tensor, x: Tensor) -> None:
        blocks = x.float().unflatten(1, (-1, self._block)).transpose(0, 1)  # [in/n, N, n]
        sums.baddbmm_(blocks.transpose(1, 2), blocks)

    def mean(self, count: Tensor) -> Tensor:
        """`[..., in/n, n, n]`, in a file without a name: those of a whole model may be large."""
        values = (self._sums / count.clamp_min(1)[..., None, None, None]).numpy()
        with tempfile.TemporaryFile() as file:
            mapped = np.memmap(file, values.dtype, "w+", shape=values.shape)
        mapped[:] = values
        return torch.from_numpy(mapped)


class _Watching:
    """A weight that adds up the squares of what it is multiplied with, before it is.

    And `products`, where they are given. Of stacked experts each is watched on its own.
    """

    products: _Products | None = None

    def __init__(self, inner: Any) -> None:
        lead, width = inner.shape[:-2], inner.shape[-1]
        self.inner = inner
        self.squares = torch.zeros(*lead, width, dtype=torch.float64)
        self.count = torch.zeros(lead, dtype=torch.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = x.flatten(0, -2)
        self.squares += flat.float().square().sum(0)
        self.count += len(flat)
        if self.products is not None:
            self.products.add(flat)
        return self._product(x, bias)

    def matmul_grouped(self, x: Tensor, counts: Tensor, *, one: bool = False) -> Tensor:
        """Of experts: `x` `[N, in]` in their order, `counts` `[E]`."""
        sizes = counts.tolist()
        for squares, rows in zip(self.squares, x.split(sizes), strict=True):
            squares += rows.float().square().sum(0)
        self.count += counts
        if self.products is not None:
            self.products.add_grouped(x, sizes)
        product: Tensor = self.inner.matmul_grouped(x, counts, one=one)
        return product

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = self.inner.matmul(x, bias)
        return product

    def moments(self, name: str) -> Tensor | None:
        """Mean squares `[in]` or `[E, in]` float32; None if it was never multiplied with."""
        if not bool(self.squares.isfinite().all()):
            raise NumericsError(
                f"calibration: the inputs of {name} are not finite, or too large to square in "
                "float32; the weights before it are damaged, or --calibrate cannot be used"
            )
        return _mean(self.squares, self.count, FEWEST_TOKENS if self.count.dim() else 1)

    @property
    def unseen(self) -> list[int]:
        """The experts that had too few tokens."""
        few = self.count < FEWEST_TOKENS
        return few.nonzero().flatten().tolist() if self.count.dim() else []


class _Ending(_Watching):
    """The head: what comes out of it is not looked at, so it is neither read nor computed."""

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG002
        return x.new_zeros(()).expand(*x.shape[:-1], self.inner.shape[-2])


def _mean(squares: Tensor, count: Tensor, fewest: int = 1) -> Tensor | None:
    """`squares` `[..., in]` over `count` `[...]`; None if nothing was counted.

    An expert that saw fewer than `fewest` gets ones: all its inputs matter alike.
    """
    if not bool(count.any()):
        return None
    mean = squares / count.clamp_min(1)[..., None]
    return torch.where(count[..., None] >= fewest, mean, 1.0).float()


@dataclass(frozen=True, eq=False)
class _Text:
    """Token ids `[1, T]` and their hidden states `[1, T, D]`, which each layer replaces."""

    ids: Tensor
    hidden: Tensor


@dataclass(frozen=True, eq=False)
class Stream:
    """A model of which every part is on torch's `meta` device, until it is its turn."""

    model: Any
    source: WeightSource
    names: Mapping[str, str]

    @contextmanager
    def filled(self, names: Sequence[str]) -> Iterator[None]:
        """Tensors `names` are read on entry, as float32, and let go on leaving."""
        before: list[tuple[nn.Module, str, Any]] = []
        try:
            for name in names:
                path, _, attribute = name.rpartition(".")
                module = self.model.get_submodule(path)
                before.append((module, attribute, getattr(module, attribute)))
                assign(self.model, name, self.source.read(self.names[name]), Computing())
            yield
        finally:
            for module, attribute, empty in before:
                setattr(module, attribute, empty)

    def below(self, *prefixes: str) -> list[str]:
        return [name for name in self.names if name.startswith(prefixes)]


@torch.inference_mode()
def second_moments(
    checkpoint: Checkpoint, texts: Sequence[list[int]], with_products: Collection[str] = ()
) -> Moments:
    """Second moments of the inputs of every matrix, in float32; products `with_products` alone.

    `texts` are token ids, each run from its own start in float32. In memory are the hidden states
    of all tokens, and the embedding or one layer.
    """
    spec, config = checkpoint.spec, checkpoint.config
    model = spec.Model(config).eval()
    fit = compare(spec, model, checkpoint.source.infos)
    fit.check()
    stream = Stream(model, checkpoint.source, fit.names)
    parts: ModelParts = model
    embedding, head = stream.below(f"{spec.embedding}."), stream.below(f"{spec.head}.")
    outside = set(embedding) | set(head) | set(stream.below(spec.layer_prefix))
    with stream.filled([name for name in fit.names if name not in outside]):
        with stream.filled(embedding):
            ids = [torch.tensor([text]) for text in texts]
            states = [_Text(i, parts.embed(i)) for i in ids]
        found = Moments({}, {})
        for number in range(config.num_hidden_layers):
            path = f"{spec.layer_prefix}{number}"
            with stream.filled(stream.below(f"{path}.")):
                found = _through_layer(checkpoint, model, path, states, with_products).after(found)
        return _through_head(model, spec.head, states, with_products).after(found)


def _watch(
    root: nn.Module, path: str, kind: type[_Watching], with_products: Collection[str]
) -> dict[str, _Watching]:
    """Put a watch before every weight below `root`; by weight name."""
    watching = {}
    for module, attribute, name in _weights(root, path):
        weight = getattr(module, attribute)
        watch = watching[name] = kind(weight)
        if name in with_products:
            watch.products = _Products.of(weight.shape)
        setattr(module, attribute, watch)
    return watching


def _moments(watching: Mapping[str, _Watching]) -> Moments:
    squares = {name: watch.moments(name) for name, watch in watching.items()}
    products = {
        name: watch.products.mean(watch.count)
        for name, watch in watching.items()
        if watch.products is not None and squares[name] is not None
    }
    known = {n: values for n, values in squares.items() if values is not None}
    few = {name: watching[name].unseen for name in known}
    return Moments(known, products, {name: experts for name, experts in few.items() if experts})


def _through_layer(
    checkpoint: Checkpoint,
    model: Any,
    path: str,
    texts: Sequence[_Text],
    with_products: Collection[str],
) -> Moments:
    """A function of its own, so that nothing of the layer outlives it."""
    shape = replace(checkpoint.config.cache_shape(), layers=1)
    layer = model.get_submodule(path)
    watching = _watch(layer, path, _Watching, with_products)
    for text in texts:
        _advance(model, layer, text, shape)
    return _moments(watching)


def _through_head(
    model: Any, path: str, texts: Sequence[_Text], with_products: Collection[str]
) -> Moments:
    parts: ModelParts = model
    watching = _watch(model.get_submodule(path), path, _Ending, with_products)
    for text in texts:
        for x in text.hidden.split(_CHUNK, 1):
            parts.logits(parts.finish(x))
    return _moments(watching)


def _advance(parts: ModelParts, layer: nn.Module, text: _Text, shape: CacheShape) -> None:
    """Replace hidden states by what `layer` makes of them, chunk by chunk as in a long prompt."""
    length = text.ids.shape[1]
    cache = KvCache(shape, torch.float32, blocks_for(length), shared=True)
    place = cache.place(length)
    for ids, x in zip(text.ids.split(_CHUNK, 1), text.hidden.split(_CHUNK, 1), strict=True):
        x.copy_(layer(x, parts.step(StepBatch.after(place, ids, cache))))
        place.length += ids.shape[1]


def _weights(root: nn.Module, path: str) -> list[tuple[nn.Module, str, str]]:
    """Every `Weight` below `root`: who holds it, as which attribute, and its name."""
    return [
        (module, attribute, f"{prefix}.{attribute}")
        for prefix, module in root.named_modules(prefix=path)
        for attribute, value in vars(module).items()
        if hasattr(value, "matmul") and hasattr(value, "dequantize")
    ]


# --- llama.cpp's importance matrix ---

_SUFFIXES = (".imatrix", ".dat", ".gguf")
_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST_ENTRIES = 65_535


@dataclass(frozen=True, eq=False)
class _Entry:
    """Sums of squares `[E, in]` (one row but for stacked experts) and their counts `[E]`."""

    sums: Tensor
    counts: Tensor


def is_imatrix(path: Path) -> bool:
    """Whether a file is an importance matrix, by its name or by how it begins; it may be damaged.

    The older form begins with its number of entries, whose upper bytes are zeros: no text does.
    """
    if path.suffix.lower() in _SUFFIXES:
        return True
    head = _head(path)
    return head == b"GGUF" or (len(head) == 4 and head[2:] == b"\0\0" and head[:2] != b"\0\0")


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise BadRequestError(f"{path} cannot be read: {error.strerror}") from None


def read_imatrix(path: Path, names: GgufNames | None) -> dict[str, Tensor]:
    """llama.cpp's importance matrix, in either form, by our weight names.

    Mean squares `[in]` float32, `[E, in]` for stacked experts. An entry that counted nothing is
    left out. Raises CheckpointError for a damaged file.
    """
    if names is None:
        raise UnsupportedError(f"{path}: this architecture has no GGUF names")
    read = _read_gguf if _head(path) == b"GGUF" else _read_older
    entries = {names.rename(name): entry for name, entry in read(path).items()}
    if not any(re.search(r"layers\.\d+\.", name) for name in entries):
        raise CheckpointError(f"{path} names no layer of this architecture")
    result, unseen = {}, []
    for name, entry in entries.items():
        for values in (entry.sums, entry.counts):
            if not bool((values.isfinite() & (values >= 0)).all()):
                raise CheckpointError(f"{path} is damaged: {name} has values that cannot be sums")
        mean = _mean(entry.sums.double(), entry.counts)
        if mean is None:
            continue
        unseen += [f"{name}[{e}]" for e in (entry.counts == 0).nonzero().flatten().tolist()]
        result[name] = mean[0] if len(mean) == 1 else mean
    if unseen:
        log.warning("%s has no activations for %s: quantized without", path, listing(unseen, 3))
    return result


def _read_older(path: Path) -> dict[str, _Entry]:
    """The binary form: int32 entries; per entry a name, int32 calls, int32 n, n float32 sums.

    A name is an int32 length and its bytes. How often and on what it was run may follow. (From
    llama.cpp's `common/imatrix-loader.cpp`.)
    """
    data = path.read_bytes()
    found: dict[str, _Entry] = {}
    at = 4
    try:
        (entries,) = struct.unpack_from("<i", data, 0)
        if not 1 <= entries <= _MOST_ENTRIES:
            raise ValueError(f"it begins with {entries} (expected a number of entries)")
        for _ in range(entries):
            (length,) = struct.unpack_from("<i", data, at)
            if length < 1:
                raise ValueError(f"a name of {length} bytes")
            name = data[at + 4 : at + 4 + length].decode()
            at += 4 + length
            calls, values = struct.unpack_from("<ii", data, at)
            if values < 1 or name in found:
                raise ValueError(f"{values} values for {name}, or not for the first time")
            sums = np.frombuffer(data, "<f4", values, at + 8).copy()
            at += 8 + 4 * values
            found[name] = _Entry(torch.from_numpy(sums)[None], torch.tensor([calls]))
    except (struct.error, ValueError) as error:
        raise CheckpointError(
            f"{path} is no imatrix file ({len(data):,} bytes): {str(error)[:200]}"
        ) from None
    return found


def _read_gguf(path: Path) -> dict[str, _Entry]:
    """The GGUF form: for each weight `NAME.in_sum2` `[E, in]`, `NAME.counts` `[E, 1]`, float32."""
    # The reader is imported here: most runs never need it.
    from starquill.checkpoint.gguf import open_gguf

    reader = open_gguf(path)
    field = reader.fields.get("general.type")
    try:
        kind = None if field is None else field.contents()
    except (ValueError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{path} has a damaged field: {error}") from None
    if kind != "imatrix":
        raise CheckpointError(f"{path} is a GGUF file of type {kind!r:.40} (expected 'imatrix')")
    tensors = {t.name: t for t in reader.tensors if t.name.endswith((_SUMS, _COUNTS))}
    found: dict[str, _Entry] = {}
    for name in tensors:
        ours = name.removesuffix(_SUMS).removesuffix(_COUNTS)
        pair = [tensors.get(ours + _SUMS), tensors.get(ours + _COUNTS)]
        if any(t is None or t.data.dtype != np.float32 for t in pair):
            raise CheckpointError(f"{path} lacks sums or counts of {ours} (expected both, float32)")
        sums, counts = (torch.from_numpy(np.array(t.data)) for t in pair if t is not None)
        width = sums.shape[-1]
        if width == 0 or sums.numel() != width * counts.numel():
            raise CheckpointError(
                f"{path} has {counts.numel()} counts for sums {list(sums.shape)} of {ours}"
            )
        found[ours] = _Entry(sums.reshape(-1, width), counts.flatten().round().long())
    return found

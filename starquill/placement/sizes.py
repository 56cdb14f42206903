"""What a model takes on a device, counted from sizes alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from starquill.errors import BadRequestError, listing
from starquill.placement.devices import CPU, DISK, kind
from starquill.placement.maps import DeviceMap

MIB = 1 << 20
# What is there besides: a GPU's context and its libraries' workspaces; the interpreter and torch.
RESERVE: Mapping[str, int] = {"cuda": 512 * MIB, "mps": 512 * MIB, CPU: 384 * MIB, DISK: 0}
_FLOAT = 4


@dataclass(frozen=True)
class Needs:
    """What a plan must have room for: `max_batch_size` sequences of `max_seq_len` tokens.

    `reserve` is kept free on each device that is used, by its kind.
    """

    max_seq_len: int
    max_batch_size: int = 1
    reserve: Mapping[str, int] = field(default_factory=lambda: RESERVE)

    def check(self, context: int) -> None:
        """Raise BadRequestError for what a model of `context` tokens cannot serve."""
        problems = []
        if not 1 <= self.max_seq_len <= context:
            problems.append(f"max_seq_len is {self.max_seq_len} (expected 1 to {context})")
        if self.max_batch_size < 1:
            problems.append(f"max_batch_size is {self.max_batch_size} (expected 1 or more)")
        if problems:
            raise BadRequestError("; ".join(problems))


@dataclass(frozen=True)
class ModelSizes:
    """A model in bytes, its weights at their planned bits.

    `layers`, `schemes` and `active` go by layer; `active` is what a token reads of it, where that
    is not all (of a mixture a few experts). With `tied` the head multiplies with the embedding,
    which counts once, and `head` is what else stands at the end (the final norm).
    `cache_per_token` is of one layer, of which a query sees `window` tokens; caches grow by `block`
    tokens, prompts are computed `chunk` at a time. `row` and `logits_row` are the activations of
    one token in a layer and behind the head.
    """

    layers: tuple[int, ...]
    embedding: int
    head: int
    tied: bool
    cache_per_token: int
    row: int
    logits_row: int
    window: int | None = None
    schemes: tuple[str | None, ...] = ()
    active: tuple[int, ...] = ()
    block: int = 64
    chunk: int = 512

    @property
    def weights(self) -> int:
        return sum(self.layers) + self.embedding + self.head

    @property
    def read_at_the_end(self) -> int:
        """What every token reads besides the layers; an embedding alone is a look-up."""
        return self.head + (self.embedding if self.tied else 0)

    def cached_tokens(self, needs: Needs) -> int:
        """How many positions of one sequence are kept."""
        blocks = -(-needs.max_seq_len // self.block)
        if self.window is not None:
            blocks = min(blocks, -(-(self.window + self.chunk + 1) // self.block) + 1)
        return (blocks + 1) * self.block  # one to copy a shared block to

    def cache(self, needs: Needs) -> int:
        """Of one layer; an empty block stands for what no query sees any more."""
        tokens = needs.max_batch_size * self.cached_tokens(needs) + self.block
        return tokens * self.cache_per_token

    def rows(self, needs: Needs) -> int:
        return max(min(self.chunk, needs.max_seq_len), needs.max_batch_size)

    def activations(self, needs: Needs) -> int:
        """Of one layer while it computes: its rows, a mask, and a cache that is written out."""
        mask = self.rows(needs) * self.cached_tokens(needs) * _FLOAT
        return self.rows(needs) * self.row + mask + self.cache(needs)

    def logits(self, needs: Needs) -> int:
        return self.rows(needs) * self.logits_row


@dataclass(frozen=True)
class Use:
    """Bytes of one device. `buffers` are for what is read from disk while it is used."""

    weights: int = 0
    cache: int = 0
    activations: int = 0
    buffers: int = 0
    reserve: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations + self.buffers + self.reserve

    def __sub__(self, other: Use) -> Use:
        return Use(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(Use)})


def host(device: str) -> str:
    """Where a layer on `device` is computed and has its cache."""
    return CPU if device == DISK else device


def account(
    sizes: ModelSizes, needs: Needs, devices: DeviceMap, parts: int | None = None
) -> dict[str, Use]:
    """What each device gives for a map.

    With `parts` only for so many of: embedding, layers, head. A map may place fewer layers than
    there are.
    """
    parts = len(devices.layers) + 2 if parts is None else parts
    uses: dict[str, Counter[str]] = defaultdict(Counter)
    streamed = 0
    if parts > 0:
        uses[devices.embed]["weights"] += sizes.embedding
        if devices.embed == DISK and sizes.tied:
            streamed = sizes.embedding
    placed = devices.layers[: max(0, parts - 1)]
    for device, weights in zip(placed, sizes.layers, strict=False):
        uses[device]["weights"] += weights
        uses[host(device)]["cache"] += sizes.cache(needs)
        uses[host(device)]["activations"] = sizes.activations(needs)
        if device == DISK:
            streamed = max(streamed, weights)
    if parts == len(devices.layers) + 2:
        uses[devices.head]["weights"] += sizes.head
        uses[host(devices.head)]["activations"] += sizes.logits(needs)
        if devices.head == DISK:
            streamed = max(streamed, sizes.head)
    if DISK in uses:
        # One is computed with while the next is read.
        uses[CPU]["buffers"] = 2 * streamed
    for device, use in uses.items():
        use["reserve"] = needs.reserve[kind(device)]
    return {device: Use(**use) for device, use in uses.items()}


@dataclass(frozen=True)
class TensorSize:
    """A tensor's shape, and the bytes and scheme that it is planned to have."""

    shape: tuple[int, ...]
    nbytes: int
    scheme: str | None = None


@dataclass(frozen=True)
class Names:
    """How an architecture names its parts (see `models.spec.ArchSpec`)."""

    layer_prefix: str
    embedding: str
    head: str


def sizes_of(
    tensors: Mapping[str, TensorSize],
    names: Names,
    layers: int,
    cache_per_token: int,
    *,
    window: int | None,
    expert_share: float = 1.0,
) -> ModelSizes:
    """Add up tensors, by our names, to the parts of a model.

    `expert_share` is how much of the experts (stacked, of three dimensions) a token reads.
    """
    pattern = re.compile(re.escape(names.layer_prefix) + r"(\d+)\.")
    weights, active, rows = [0] * layers, [0] * layers, [0] * layers
    schemes: list[Counter[str]] = [Counter() for _ in range(layers)]
    embedding = end = vocabulary = 0
    for name, tensor in tensors.items():
        if match := pattern.match(name):
            layer = int(match[1])
            weights[layer] += tensor.nbytes
            share = expert_share if len(tensor.shape) > 2 else 1
            active[layer] += round(tensor.nbytes * share)
            if len(tensor.shape) > 1:
                # Every matrix's input and output at once is more than is ever there.
                rows[layer] += sum(tensor.shape[-2:])
                schemes[layer][tensor.scheme or "dense"] += 1
        elif name.startswith(f"{names.embedding}."):
            embedding += tensor.nbytes
            vocabulary = tensor.shape[0]
        else:
            end += tensor.nbytes
    return ModelSizes(
        layers=tuple(weights),
        embedding=embedding,
        head=end,
        tied=not any(name.startswith(f"{names.head}.") for name in tensors),
        cache_per_token=cache_per_token,
        row=max(rows, default=0) * _FLOAT,
        logits_row=vocabulary * _FLOAT,
        window=window,
        schemes=tuple(_schemes(found) for found in schemes),
        active=tuple(active),
    )


def _schemes(found: Counter[str]) -> str | None:
    """Of one layer's matrices, the commonest first; None where all stay as they are."""
    if set(found) <= {"dense"}:
        return None
    return listing([name for name, _ in found.most_common()])

"""`AdapterStore`: the adapters of a loaded model, by alias, and who is using which."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import TracebackType

import torch

from starquill.adapters.adapter import Adapter, AwayLayers, Base, BaseModules
from starquill.adapters.banks import put, take_out
from starquill.adapters.fitting import fit
from starquill.adapters.opening import open_adapter, weight_bytes
from starquill.checkpoint.hub import locate_adapter
from starquill.errors import BadRequestError, CapacityError, StageLostError, listing
from starquill.nn.lora import AdapterMix

log = logging.getLogger("starquill")
_MIXES_KEPT = 64


@dataclass(frozen=True)
class AdapterLimits:
    """How much may be loaded. With `evict` those that nobody uses make room, longest idle first."""

    count: int = 16
    rank: int = 256
    bytes: int = 8 << 30
    evict: bool = False


@dataclass(frozen=True)
class AdapterInfo:
    """A loaded adapter, for people. `generation` is another for each time that one is loaded."""

    alias: str
    folder: Path
    form: str
    rank: int
    nbytes: int
    generation: int
    leases: int


@dataclass(eq=False)
class _Resident:
    alias: str
    folder: Path
    form: str
    rank: int
    nbytes: int
    slot: int
    generation: int
    leases: int = 0
    last_used: int = 0


@dataclass(eq=False)
class Lease:
    """A request's hold on its adapters: until it is released they stay as they are.

    `slots` and `weights` go together. `key` is another for another adapter, another loading of the
    same one, and other weights: what was computed under one key is of no use under another.
    """

    slots: tuple[int, ...]
    weights: tuple[float, ...]
    key: Hashable
    _store: AdapterStore
    _residents: tuple[_Resident, ...]
    _released: bool = field(default=False)

    def release(self) -> None:
        self._store._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class AdapterStore:
    """Loads adapters into free slots of a model's banks. Safe for several threads.

    Files are read without holding up requests, and nothing that a step reads is ever changed: a
    bank's parts are replaced as a whole.
    """

    def __init__(
        self,
        base: Base,
        limits: AdapterLimits | None = None,
        away: Sequence[AwayLayers] = (),
    ) -> None:
        """`away` have the layers of `base` that are not in this process."""
        self._base = base
        self._away = away
        self._filling: set[int] = set()  # slots whose adapter is not there for anybody yet
        self.limits = limits or AdapterLimits()
        self._lock = Lock()
        self._by_alias: dict[str, _Resident] = {}
        self._leaving: list[_Resident] = []  # without an alias, until their last lease ends
        self._clock = 0
        self._mixes: OrderedDict[Hashable, AdapterMix] = OrderedDict()

    def load(self, alias: str, folder: str | Path) -> AdapterInfo:
        """Load the adapter in `folder`, or of a hub id, as `alias`, in place of one of this name.

        Raises what `open_adapter` does, and CapacityError past a limit.
        """
        if not alias:
            raise BadRequestError("an adapter's alias is empty")
        folder = locate_adapter(folder)
        if (size := weight_bytes(folder)) > self.limits.bytes:
            self._too_many(alias, f"{size:,} bytes", f"{self.limits.bytes:,}")
        base = BaseModules.of(self._base)
        adapter = open_adapter(folder, base)
        if adapter.rank > self.limits.rank:
            self._too_many(alias, f"rank {adapter.rank}", f"rank {self.limits.rank}")
        parts = fit(adapter, base)
        for warning in adapter.warnings:
            log.warning("adapter %s (%s): %s", alias, folder, warning)
        with self._lock:
            slot = self._free_slot()
            self._filling.add(slot)
        try:
            self._fill_away(base, slot, adapter)
            with self._lock:
                self._make_room(alias, adapter)
                self._clock += 1
                resident = _Resident(
                    alias, folder, adapter.form, adapter.rank, adapter.nbytes, slot, self._clock
                )
                resident.last_used = self._clock
                put(base, slot, parts)
                if (old := self._by_alias.pop(alias, None)) is not None:
                    self._leave(old)
                self._by_alias[alias] = resident
                return _info(resident)
        except BaseException:
            self._empty_away(slot)
            raise
        finally:
            self._filling.discard(slot)

    def unload(self, alias: str) -> None:
        """Take an alias away. Requests that use it go on."""
        with self._lock:
            self._leave(self._by_alias.pop(self._known(alias).alias))

    def list(self) -> tuple[AdapterInfo, ...]:
        with self._lock:
            return tuple(_info(resident) for resident in self._by_alias.values())

    def lease(self, adapters: Mapping[str, float]) -> Lease:
        """Hold on to `adapters`, each with its weight. BadRequestError for one not loaded."""
        for alias, weight in adapters.items():
            if not math.isfinite(weight) or abs(weight) > 1e4:
                raise BadRequestError(f"adapter {alias!r} has weight {weight} (expected a number)")
        with self._lock:
            found = [(self._known(alias), float(weight)) for alias, weight in adapters.items()]
            acting = sorted(
                ((one, weight) for one, weight in found if weight), key=lambda pair: pair[0].slot
            )
            self._clock += 1
            for resident, _ in acting:
                resident.leases += 1
                resident.last_used = self._clock
            return Lease(
                slots=tuple(resident.slot for resident, _ in acting),
                weights=tuple(weight for _, weight in acting),
                key=tuple((r.alias, r.generation, weight) for r, weight in acting),
                _store=self,
                _residents=tuple(resident for resident, _ in acting),
            )

    def mix_of(self, leases: Sequence[Lease | None], rows: Sequence[int]) -> AdapterMix | None:
        """What acts on a batch of which each lease has so many `rows`; None for the base alone.

        The same one as long as a batch is composed alike.
        """
        key = tuple((lease.key if lease else (), n) for lease, n in zip(leases, rows, strict=True))
        slots = sorted({slot for lease in leases if lease for slot in lease.slots})
        if not slots:
            return None
        with self._lock:
            if (known := self._mixes.get(key)) is not None:
                self._mixes.move_to_end(key)
                return known
            mix = AdapterMix(tuple(slots), torch.tensor(_shares(leases, rows, slots)))
            self._mixes[key] = mix
            if len(self._mixes) > _MIXES_KEPT:
                self._mixes.popitem(last=False)
            return mix

    def _known(self, alias: str) -> _Resident:
        resident = self._by_alias.get(alias)
        if resident is None:
            loaded = listing(sorted(self._by_alias)) or "none"
            raise BadRequestError(f"no adapter {alias!r} is loaded (loaded: {loaded})")
        return resident

    def _too_many(self, alias: str, found: str, allowed: str) -> None:
        raise CapacityError(f"adapter {alias} takes {found} (at most {allowed})")

    def _make_room(self, alias: str, adapter: Adapter) -> None:
        """Let idle adapters go until the new one fits; the one it replaces goes anyway if idle."""
        limits, going = self.limits, self._by_alias.get(alias)
        staying = [r for r in self._by_alias.values() if r is not going or r.leases]
        staying += self._leaving
        idle = sorted(
            (r for r in staying if not r.leases and limits.evict), key=lambda r: r.last_used
        )
        evicted: list[_Resident] = []

        def fits() -> bool:
            left = [r for r in staying if r not in evicted]
            nbytes = sum(r.nbytes for r in left) + adapter.nbytes
            return len(left) < limits.count and nbytes <= limits.bytes

        while not fits():
            if not idle:
                raise CapacityError(
                    f"adapter {alias} of {adapter.nbytes:,} bytes has no room beside "
                    f"{len(staying)} others (at most {limits.count}, of {limits.bytes:,} bytes in "
                    "all); unload one"
                )
            evicted.append(idle.pop(0))
        for resident in evicted:
            log.info("adapter %s makes room for %s", resident.alias, alias)
            self._leave(self._by_alias.pop(resident.alias))

    def _free_slot(self) -> int:
        taken = {r.slot for r in (*self._by_alias.values(), *self._leaving)} | self._filling
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _fill_away(self, base: BaseModules, slot: int, adapter: Adapter) -> None:
        for away in self._away:
            own = {p: part for p, part in adapter.parts.items() if base.layer_of(p) in away.layers}
            away.fill(slot, own)

    def _empty_away(self, slot: int) -> None:
        for away in self._away:
            with suppress(StageLostError):  # there is nothing left to take away from
                away.empty(slot)

    def _leave(self, resident: _Resident) -> None:
        if resident.leases:
            self._leaving.append(resident)
            return
        self._mixes.clear()  # they keep alive what they were prepared for
        take_out(self._base.model, resident.slot)
        self._empty_away(resident.slot)

    def _release(self, lease: Lease) -> None:
        with self._lock:
            if lease._released:
                return
            lease._released = True
            for resident in lease._residents:
                resident.leases -= 1
                if not resident.leases and resident in self._leaving:
                    self._leaving.remove(resident)
                    self._leave(resident)


def _shares(
    leases: Sequence[Lease | None], rows: Sequence[int], slots: Sequence[int]
) -> list[list[float]]:
    """How strongly each of `slots` acts on each row."""
    shares = []
    for lease, count in zip(leases, rows, strict=True):
        own = dict(zip(lease.slots, lease.weights, strict=True)) if lease else {}
        shares += [[own.get(slot, 0.0) for slot in slots]] * count
    return shares


def _info(resident: _Resident) -> AdapterInfo:
    return AdapterInfo(
        alias=resident.alias,
        folder=resident.folder,
        form=resident.form,
        rank=resident.rank,
        nbytes=resident.nbytes,
        generation=resident.generation,
        leases=resident.leases,
    )

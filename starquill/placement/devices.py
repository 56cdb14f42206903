"""Names of devices, the fastest first, and how much memory each may give."""

from __future__ import annotations

import math
import re

from starquill.errors import BadRequestError, listing

CPU, DISK = "cpu", "disk"
_SPEED = ("cuda", "mps", CPU, DISK)
KNOWN = "cpu, cuda:N, mps, disk"
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")},
    **{f"{prefix}IB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")},
}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Z]*)", re.ASCII)


def read_device(text: str) -> str | None:
    """The one spelling of a device (`cuda` and `cuda[0]` are `cuda:0`); None if there is none."""
    text = text.strip().lower()
    if match := re.fullmatch(r"cuda(?::(\d{1,3})|\[(\d{1,3})\])?", text, re.ASCII):
        return f"cuda:{int(match[1] or match[2] or 0)}"
    return text if text in _SPEED[1:] else None


def kind(device: str) -> str:
    return device.partition(":")[0]


def slowness(device: str) -> tuple[int, int]:
    """A key to sort devices with: the fastest first, GPUs by their number."""
    name, _, number = device.partition(":")
    return _SPEED.index(name), int(number or 0)


def read_budgets(text: str, option: str = "--max-memory") -> dict[str, float]:
    """`cuda:0=10GiB,cpu=16GB,disk=inf` in bytes; all that is wrong in one error."""
    budgets: dict[str, float] = {}
    problems = []
    for item in text.split(","):
        name, _, amount = item.partition("=")
        device, size = read_device(name), _read_size(amount)
        if device is None:
            problems.append(f"{item.strip()!r} names no device (expected {KNOWN})")
        if size is None:
            problems.append(f"{item.strip()!r} has no size (expected 10GiB, 500MB or inf)")
        if device in budgets:
            problems.append(f"{device} is there twice")
        if device is not None and size is not None:
            budgets.setdefault(device, size)
    if problems:
        raise BadRequestError(f"{option}: {listing(problems)}")
    return budgets


def _read_size(text: str) -> float | None:
    text = text.strip().upper()
    if text == "INF":
        return math.inf
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        return None
    return math.floor(float(match[1]) * _UNITS[match[2]])


def size_text(size: float) -> str:
    """Bytes for people."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return "no limit" if size == math.inf else f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"

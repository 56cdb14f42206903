"""Names of quantization schemes, and which one a matrix of given width can have."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from starquill.errors import BadRequestError
from starquill.quant.affine import BITS, GROUPS

METHODS = ("auto", "rtn", "hqq")
# Fewer bits need smaller groups: the range of a group is what 2 bits cannot afford.
DEFAULT_GROUP = {2: 32, 3: 64, 4: 64, 5: 64, 6: 64, 8: 64}
_NAME = re.compile(r"q?(\d+)(?:-g(\d+))?(?:-([a-z]+))?", re.ASCII)
VALID = (
    f"{', '.join(map(str, BITS))}, or q4-g64 with bits {', '.join(map(str, BITS))} and group "
    f"{', '.join(map(str, GROUPS))}, and -{' or -'.join(METHODS[1:])} behind it"
)


@dataclass(frozen=True)
class Scheme:
    """Bits per weight, weights per scale, and how scale and bias are found."""

    bits: int
    group: int
    method: str = "auto"

    def __str__(self) -> str:
        return f"q{self.bits}-g{self.group}"

    @property
    def bits_per_weight(self) -> float:
        """Scales and biases included: two of 16 bits a group."""
        return self.bits + 32 / self.group

    @property
    def resolved_method(self) -> str:
        """What `auto` means: range search from 4 bits up, half-quadratic below."""
        if self.method != "auto":
            return self.method
        return "rtn" if self.bits >= 4 else "hqq"

    def fitting(self, width: int) -> Scheme | None:
        """This scheme with the largest allowed group that divides `width`; None if none does."""
        for group in sorted(GROUPS, reverse=True):
            if group <= self.group and width % group == 0:
                return replace(self, group=group)
        return None


def parse_scheme(text: str) -> Scheme:
    """`4`, `q4-g64`, `3-hqq`... Raises BadRequestError with the list of valid ones."""
    match = _NAME.fullmatch(text.strip().lower())
    bits = int(match[1]) if match else 0
    if match is None or bits not in BITS:
        raise BadRequestError(f"unknown quantization scheme {text!r} (valid: {VALID})")
    group = int(match[2]) if match[2] else DEFAULT_GROUP[bits]
    method = match[3] or "auto"
    if group not in GROUPS or method not in METHODS:
        raise BadRequestError(f"unknown quantization scheme {text!r} (valid: {VALID})")
    return Scheme(bits, group, method)

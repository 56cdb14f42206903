from torch import Tensor

def isa() -> str: ...
def isa_levels() -> list[str]: ...
def select_isa(name: str, /) -> None: ...
def dense_matmul(
    weight: Tensor, x: Tensor, bias: Tensor | None, out: Tensor, threads: int, /
) -> None: ...
def largest(weight: Tensor, threads: int, /) -> float: ...
def quantize(
    weight: Tensor,
    settings: tuple[int, int],
    shares: list[float],
    importance: Tensor | None,
    unit: float,
    packed: Tensor,
    scales: Tensor,
    biases: Tensor,
    threads: int,
    /,
) -> None: ...

class Affine:
    def __init__(
        self, packed: Tensor, scales: Tensor, biases: Tensor, bits: int, group: int, /
    ) -> None: ...
    def matmul(
        self, x: Tensor, bias: Tensor | None, out: Tensor, exact: bool, threads: int, /
    ) -> None: ...
    def dequantize(self, out: Tensor, threads: int, /) -> None: ...

from typing import Any

def norms(
    x: Any, g: Any, shape: tuple[int, ...], squares: Any, stored: Any, first: int, stop: int, /
) -> None: ...
def add(
    x: Any, g: Any, shape: tuple[int, ...], factors: Any, total: Any, first: int, stop: int, /
) -> None: ...
def add_outer(x: Any, g: Any, factors: Any, total: Any, sizes: tuple[int, ...], /) -> None: ...
def add_mapped(
    x: Any,
    g: Any,
    multiplier: Any,
    shift: Any,
    squares: Any,
    lengths: tuple[float, float, float],
    sizes: tuple[int, ...],
    /,
) -> None: ...
def width(bits: int = 0, /) -> int: ...

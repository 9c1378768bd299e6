from typing import Any

Team = tuple[int, int]

def norms(
    x: Any, g: Any, shape: tuple[int, ...], squares: Any, stored: Any, team: Team, /
) -> None: ...
def add(
    x: Any, g: Any, shape: tuple[int, ...], factors: Any, total: Any, team: Team, /
) -> None: ...
def add_outer(
    x: Any, g: Any, factors: Any, total: Any, sizes: tuple[int, ...], team: Team, /
) -> None: ...
def add_mapped(
    x: Any,
    g: Any,
    multiplier: Any,
    shift: Any,
    squares: Any,
    lengths: tuple[float, float, float],
    sizes: tuple[int, ...],
    team: Team,
    /,
) -> None: ...
def width(bits: int = 0, /) -> int: ...

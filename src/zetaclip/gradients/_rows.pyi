from typing import Any

def norms(
    tasks: list[tuple[Any, Any]],
    rows: int,
    values: Any,
    fresh: bool,
    lost: float,
    scale: float,
    /,
) -> float: ...
def weigh(
    tasks: list[tuple[Any, Any]], rows: int, factors: Any, team: tuple[int, int], /
) -> None: ...
def join(
    tasks: list[tuple[Any, Any]],
    index: Any,
    weights: Any,
    sizes: tuple[int, int, int],
    team: tuple[int, int],
    /,
) -> None: ...
def mapped(matrix: Any, multiplier: Any, shift: Any, squares: Any, rows: int, /) -> None: ...

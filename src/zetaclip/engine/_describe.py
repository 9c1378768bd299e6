"""Which path the per-example gradients of each parameter take."""

from __future__ import annotations

from dataclasses import dataclass

from ..gradients import LayerCapture
from ..gradients.rules import layer_type
from ._private_module import PrivateModule


@dataclass(frozen=True)
class LayerPath:
    """Which path the per-example gradients of one parameter take."""

    parameter: str
    shape: tuple[int, ...]
    layer: str
    path: str


class Description(tuple[LayerPath, ...]):
    """The paths of all trained parameters; prints as a table."""

    def __str__(self) -> str:
        rows = [("parameter", "shape", "layer", "path")]
        rows += [
            (p.parameter, "x".join(map(str, p.shape)) or "scalar", p.layer, p.path) for p in self
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def described_paths(model: PrivateModule) -> Description:
    """One line for each trained parameter."""
    found: dict[int, list[LayerCapture]] = {}
    for shadow in model.shadows:
        for key in shadow.keys.values():
            found.setdefault(key, []).append(shadow)
    lines = []
    for name, parameter in zip(model.layout.names, model.layout.parameters, strict=True):
        shadows = found[id(parameter)]
        layers = ", ".join(f"{s.name} ({layer_type(s.module).__name__})" for s in shadows)
        paths = ", ".join(dict.fromkeys(s.path for s in shadows))
        lines.append(LayerPath(name, tuple(parameter.shape), layers, paths))
    return Description(lines)

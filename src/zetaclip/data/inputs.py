"""How raw records become the rows of ``x``: public constants, kept beside a trained network.

An input is what a loader did to its files, as a frozen value that can be written as JSON and read
back. So a run folder can prepare new records as the training records were prepared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import InputError
from .columns import TYPES, Column, encode, feature_names
from .schema import near_column

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class TableInput:
    """Rows of a table.

    Attributes:
        columns: The columns that are used, in the order of ``x``.
        ignored: Columns of the training table that are not used.
    """

    kind: ClassVar[str] = "table"
    columns: tuple[Column, ...]
    ignored: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a prepared record."""
        return (len(feature_names(self.columns)),)

    def prepare(
        self, table: Mapping[str, Sequence[str]], lines: Sequence[int] | None = None
    ) -> Tensor:
        """Rows of ``x``.

        Args:
            table: Fields as text, by column; columns that are not used may be there.
            lines: The line of each record in its file, for error messages.

        Raises:
            InputError: A column is missing, or a field can't be read as what was declared.
        """
        import torch

        missing = [column.name for column in self.columns if column.name not in table]
        if missing:
            shown = missing if len(missing) < 5 else [*missing[:3], f"{len(missing) - 3} more"]
            told = (
                near_column(missing[0], table)
                if len(missing) == 1
                else f"{len(missing)} columns are missing: {', '.join(shown)}."
            )
            raise InputError(f"{told} The table has {', '.join(table)}")
        return torch.from_numpy(encode(self.columns, table, lines))

    def describe(self) -> dict[str, Any]:
        """The value as JSON."""
        columns = {column.name: column.entry() for column in self.columns}
        ignored = {name: {"type": "ignore"} for name in self.ignored}
        return {"kind": self.kind, "columns": {**columns, **ignored}}

    @classmethod
    def from_description(cls, values: Mapping[str, Any]) -> TableInput:
        """The input that ``describe`` described."""
        columns, ignored = [], []
        for name, entry in values["columns"].items():
            if entry["type"] == "ignore":
                ignored.append(name)
            elif entry["type"] in TYPES:
                columns.append(TYPES[entry["type"]].from_entry(name, entry))
            else:
                raise InputError(f"column {name!r} has the unknown type {entry['type']!r}")
        return cls(tuple(columns), tuple(ignored))


@dataclass(frozen=True)
class ImageInput:
    """Pictures of one size.

    Attributes:
        shape: Channels, height and width.
        scaling: See ``pixels.scaled``.
        constants: Entry of ``pixels.STATISTICS`` for the scaling "statistics".
        white: The largest pixel value of an array of pixels.
    """

    kind: ClassVar[str] = "images"
    shape: tuple[int, int, int]
    scaling: str = "symmetric"
    constants: str = ""
    white: float = 255.0

    def prepare(self, pixels: np.ndarray, white: float | None = None) -> Tensor:
        """Rows of ``x``.

        Args:
            pixels: Values from 0 to ``white``: (n, channels, height, width), or without channels
                for grey pictures, or with the channels last.
            white: The largest pixel value, if it is not the one of the training pictures: 255 for
                picture files.

        Raises:
            InputError: The pictures have another shape.
        """
        from .pixels import scaled

        given = tuple(pixels.shape)
        channels, height, width = self.shape
        if channels == 1 and given[1:] == (height, width):
            pixels = pixels[:, None]
        elif given[1:] == (height, width, channels) and given[1:] != self.shape:
            pixels = pixels.transpose(0, 3, 1, 2)
        elif given[1:] != self.shape:
            raise InputError(
                f"pictures of shape {given[1:]} were given, and the network takes {self.shape}:"
                " channels, height, width"
            )
        return scaled(pixels, self.scaling, self.constants, white or self.white)

    def describe(self) -> dict[str, Any]:
        """The value as JSON."""
        return {
            "kind": self.kind,
            "shape": list(self.shape),
            "scaling": self.scaling,
            "constants": self.constants,
            "white": self.white,
        }

    @classmethod
    def from_description(cls, values: Mapping[str, Any]) -> ImageInput:
        """The input that ``describe`` described."""
        channels, height, width = values["shape"]
        return cls(
            (int(channels), int(height), int(width)),
            str(values["scaling"]),
            str(values["constants"]),
            float(values["white"]),
        )


Input = TableInput | ImageInput
KINDS: dict[str, Any] = {cls.kind: cls for cls in (TableInput, ImageInput)}


def from_description(values: Mapping[str, Any]) -> Input:
    """The input that an input's ``describe`` described.

    Raises:
        InputError: The kind is unknown, e.g. because a newer version wrote it.
    """
    kind = values.get("kind")
    if kind not in KINDS:
        raise InputError(f"unknown kind of input {kind!r}; known: {', '.join(KINDS)}")
    found: Input = KINDS[kind].from_description(values)
    return found

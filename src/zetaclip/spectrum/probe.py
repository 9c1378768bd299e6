"""Which weights are read, and when: from a module to a fitted tail per layer.

The probe reads only weights. Its caller lists the tensors that may be read (in private training:
those that the private update writes), and the probe refuses all others.
"""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .eigenvalues import eigenvalues
from .fits import METHODS, TailFit
from .tail import fit_tail

AGGREGATES = ("median", "mean")

# The default layer of a plain network is its last Linear with at least this many eigenvalues.
_SMALLEST_SIDE = 16

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Reading:
    """The fits of all probed layers after ``step`` updates.

    Attributes:
        step: Number of updates before the reading.
        fits: The fit of each layer.
        shapes: The matrix shape of each layer.
        spectra: The eigenvalues of each layer, if available.
    """

    step: int
    fits: dict[str, TailFit]
    shapes: dict[str, tuple[int, int]]
    spectra: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)


class Probe:
    """Fits the spectrum of chosen layers every ``period`` updates.

    A controller that is given a probe sets its ``fit`` and ``period``.

    Args:
        layers: A layer or parameter name, a glob, or a list of those. The name of a container
            means the last convolution or Linear inside it. None: the layer called fc1; otherwise,
            for a ResNet, the last convolution of the stem, of the second and of the last stage, and
            fc; otherwise the last Linear whose smaller side is at least 16.
        aggregate: How a controller combines several layers, "median" or "mean".
        fit: Method of ``fit_tail``.
        k: Tail size of ``fit_tail``.
        period: Updates between readings.
        shuffle: Reads a random permutation of each weight's entries instead of the weight. This is
            a control experiment: same values, no structure.

    Raises:
        ValueError: An argument has a value that is not allowed.

    Examples:
        >>> probe = Probe("fc1").bind(model, dict(model.named_parameters()))
        >>> probe.read(model, step=0).fits["fc1"].zeta
        2.31
    """

    def __init__(
        self,
        layers: str | Sequence[str] | None = None,
        aggregate: str = "median",
        *,
        fit: str = "rank",
        k: int | None = None,
        period: int = 1,
        shuffle: bool = False,
    ) -> None:
        if aggregate not in AGGREGATES:
            raise ValueError(
                f"unknown aggregate {aggregate!r}; choose one of {', '.join(AGGREGATES)}"
            )
        _check(fit, period)
        self.layers = (
            [layers] if isinstance(layers, str) else None if layers is None else list(layers)
        )
        if self.layers is not None and not self.layers:
            raise ValueError(
                "an empty list of layers leaves nothing to probe; use None for the default"
            )
        self.aggregate = aggregate
        self.fit = fit
        self.k = k
        self.period = period
        self.shuffle = shuffle
        self.bound: dict[str, str] = {}

    def configured(self, *, fit: str, period: int, shuffle: bool) -> Probe:
        """An unbound copy with other settings.

        Args:
            fit: Method of ``fit_tail``.
            period: Updates between readings.
            shuffle: Whether to read shuffled weights.

        Returns:
            The copy.
        """
        _check(fit, period)
        probe = copy.copy(self)
        probe.fit, probe.period, probe.shuffle, probe.bound = fit, period, shuffle, {}
        return probe

    def bind(self, module: nn.Module, trained: dict[str, nn.Parameter]) -> Probe:
        """A copy whose layers are chosen, once, from the layers of ``module``.

        Args:
            module: The model.
            trained: The parameters that may be read.

        Returns:
            The copy, ready for ``read``.

        Raises:
            ValueError: No layer matches, or a layer given by name may not be read.

        **Guarantee.** A tensor that is not in ``trained`` is never read. Naming one raises; a glob
        and the default choice skip it.
        """
        allowed = {id(parameter) for parameter in trained.values()}
        matrices = dict(_matrices(module))
        readable = {
            label: name for label, (name, tensor) in matrices.items() if id(tensor) in allowed
        }
        if self.layers is None:
            chosen = _default_layers(module, readable)
            if not chosen:
                raise ValueError(
                    "no default layer to probe: neither fc1, nor a ResNet's stages, nor a Linear "
                    f"whose smaller side is at least {_SMALLEST_SIDE}. Name one with probe=. "
                    f"{_candidates(readable, matrices)}"
                )
        else:
            chosen = []
            for pattern in self.layers:
                chosen += [
                    label
                    for label in _resolve(pattern, module, readable, matrices)
                    if label not in chosen
                ]
        probe = copy.copy(self)
        probe.bound = {label: readable[label] for label in chosen}
        return probe

    def read(self, module: nn.Module, step: int) -> Reading | None:
        """Fits the bound layers.

        Args:
            module: The model that was given to ``bind``.
            step: Number of updates so far.

        Returns:
            The fits, or None if ``step`` is not a multiple of ``period``.

        Raises:
            RuntimeError: The probe is not bound.
        """
        if not self.bound:
            raise RuntimeError(
                "the probe is not bound to a module yet: "
                "call read on the probe that bind(module, trained) returns"
            )
        if step % self.period:
            return None
        fits, shapes, spectra = {}, {}, {}
        for label, name in self.bound.items():
            matrix = module.get_parameter(name).detach().flatten(1)
            shape = (int(matrix.shape[0]), int(matrix.shape[1]))
            if self.shuffle:
                matrix = _shuffled(matrix, step)
            spectra[label] = eigenvalues(matrix)
            fits[label] = fit_tail(spectra[label], self.fit, self.k, shape)
            shapes[label] = shape
        return Reading(step, fits, shapes, spectra)

    def __repr__(self) -> str:
        layers = "default" if self.layers is None else ", ".join(self.layers)
        return f"Probe({layers}; {self.aggregate}, fit={self.fit}, period={self.period})"


def _check(fit: str, period: int) -> None:
    if fit not in METHODS:
        raise ValueError(f"unknown fit {fit!r}; choose one of {', '.join(METHODS)}")
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise ValueError(
            f"the probe period must be a whole number of updates, at least 1, not {period!r}"
        )


def _shuffled(matrix: Tensor, step: int) -> Tensor:
    """The same entries in an order that depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    order = torch.randperm(matrix.numel(), generator=generator)
    return matrix.cpu().flatten()[order].view(matrix.shape)


def _matrices(module: nn.Module) -> Iterator[tuple[str, tuple[str, nn.Parameter]]]:
    """Every parameter with a spectrum: label -> (parameter name, parameter).

    The label is the layer's name if its only such parameter is called ``weight``; otherwise it is
    the parameter's name.
    """
    for layer_name, layer in module.named_modules():
        own = [(name, p) for name, p in layer.named_parameters(recurse=False) if p.ndim >= 2]
        for name, parameter in own:
            full = f"{layer_name}.{name}" if layer_name else name
            yield (
                (layer_name if len(own) == 1 and name == "weight" and layer_name else full),
                (full, parameter),
            )


def _candidates(readable: dict[str, str], matrices: dict[str, tuple[str, nn.Parameter]]) -> str:
    if not readable:
        return "None of this module's matrices is trained."
    listed = [f"{label} {'x'.join(map(str, matrices[label][1].shape))}" for label in readable]
    return "Candidates: " + ", ".join(listed) + "."


def _resolve(
    pattern: str,
    module: nn.Module,
    readable: dict[str, str],
    matrices: dict[str, tuple[str, nn.Parameter]],
) -> list[str]:
    """The labels that one name or glob selects, in the module's order."""
    exact = [label for label, (name, _) in matrices.items() if pattern in (label, name)]
    if not exact and pattern in dict(module.named_modules()):
        inside = [label for label in matrices if label.startswith(pattern + ".")]
        exact = _last_of(module, inside, (*_CONVOLUTIONS, nn.Linear)) or inside[-1:]
    if exact:
        frozen = [label for label in exact if label not in readable]
        if frozen:
            raise ValueError(
                f"{frozen[0]} is not among the tensors that training updates, so it must not be "
                "probed: only released weights may be read. "
                f"{_candidates(readable, matrices)}"
            )
        return exact
    found = [
        label
        for label, name in readable.items()
        if fnmatch.fnmatchcase(label, pattern) or fnmatch.fnmatchcase(name, pattern)
    ]
    if not found:
        raise ValueError(
            f"no trained layer matches probe {pattern!r}. {_candidates(readable, matrices)}"
        )
    return found


def _last_of(
    module: nn.Module, labels: Sequence[str], types: tuple[type[nn.Module], ...]
) -> list[str]:
    """The last of ``labels`` that is a layer of these types, as a list of at most one.

    Projections on a shortcut are registered after the block's own convolutions but are not its
    last layer.
    """
    modules = dict(module.named_modules())
    fitting = [label for label in labels if isinstance(modules.get(label), types)]
    main = [
        label for label in fitting if not re.search(r"(^|\.)(downsample|shortcut)(\.|$)", label)
    ]
    return (main or fitting)[-1:]


def _default_layers(module: nn.Module, readable: dict[str, str]) -> list[str]:
    labels = list(readable)
    named = [label for label in labels if label.split(".")[-1] == "fc1"]
    if named:
        return ["fc1"] if "fc1" in named else named[:1]
    stages = sorted(
        (name for name, _ in module.named_children() if re.fullmatch(r"layer\d+", name)),
        key=lambda name: int(name.removeprefix("layer")),
    )
    if len(stages) >= 2 and "fc" in labels:
        return _resnet_layers(module, labels, stages)
    modules = dict(module.named_modules())
    wide = [
        label
        for label in labels
        if isinstance(layer := modules.get(label), nn.Linear)
        and min(layer.in_features, layer.out_features) >= _SMALLEST_SIDE
    ]
    return wide[-1:]


def _resnet_layers(module: nn.Module, labels: Sequence[str], stages: Sequence[str]) -> list[str]:
    inside = [label for label in labels if label.split(".")[0] in stages]
    before = labels[: labels.index(inside[0])] if inside else labels
    chosen = _last_of(module, before, _CONVOLUTIONS)
    for stage in (stages[1], stages[-1]):
        part = [label for label in labels if label.startswith(stage + ".")]
        chosen += [label for label in _last_of(module, part, _CONVOLUTIONS) if label not in chosen]
    return [*chosen, "fc"]

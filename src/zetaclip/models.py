"""The networks of the paper and of the command line, by name.

Every layer treats each record by itself (GroupNorm, no BatchNorm), so all of them can be trained privately. Layers that a
spectral probe is pointed at have the paper's names: conv1, conv2, fc1, fc2; stem, layer1 ... layer4, fc.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from .errors import InputError

if TYPE_CHECKING:
    from .data import Dataset

Shape = tuple[int, ...]

# Hidden widths of the perceptrons, by their number of linear layers.
_HIDDEN = {2: (128,), 3: (128, 64), 4: (256, 128, 64), 5: (256, 128, 64, 32)}


class Cnn(nn.Module):
    """The network of Opacus's MNIST example: two convolutions with large kernels, two linear layers.

    Below 16 pixels a kernel of 8 finds nothing to slide over; there the kernels are 3x3 and only the second one strides.
    """

    def __init__(self, input_shape: Shape, outputs: int) -> None:
        super().__init__()
        channels, height, width = _image(input_shape, "cnn", 6)
        if min(height, width) >= 16:
            self.conv1 = nn.Conv2d(channels, 16, 8, 2, padding=3)
            self.conv2 = nn.Conv2d(16, 32, 4, 2)
        else:
            self.conv1 = nn.Conv2d(channels, 16, 3, 1, padding=1)
            self.conv2 = nn.Conv2d(16, 32, 3, 2)
        sides = [_after(_after(side, self.conv1) - 1, self.conv2) - 1 for side in (height, width)]
        self.fc1 = nn.Linear(32 * math.prod(sides), 32)
        self.fc2 = nn.Linear(32, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class CnnLarge(nn.Module):
    """Two 3x3 convolutions of 32 and 64 channels, each followed by a halving; linear layers of 128 and the outputs."""

    def __init__(self, input_shape: Shape, outputs: int) -> None:
        super().__init__()
        channels, height, width = _image(input_shape, "cnn-large", 4)
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * (height // 4) * (width // 4), 128)
        self.fc2 = nn.Linear(128, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Block(nn.Module):
    """Two 3x3 convolutions with GroupNorm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = _norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = _norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages ``layer1``, ``layer2`` ... of residual blocks, a mean over the image, and ``fc``.

    The stem is 3x3 with stride 1 and no pooling, as is usual for 32x32 images; from 96 pixels on it is the 7x7 with stride 2
    and the pooling of the published ResNets.
    """

    def __init__(
        self, input_shape: Shape, outputs: int, widths: tuple[int, ...], depths: tuple[int, ...]
    ) -> None:
        super().__init__()
        channels, height, width = _image(input_shape, "a ResNet", 2 ** (len(widths) - 1))
        self.large = min(height, width) >= 96
        if self.large:
            self.stem = nn.Conv2d(channels, widths[0], 7, 2, 3, bias=False)
        else:
            self.stem = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.norm = _norm(widths[0])
        self.stages = tuple(f"layer{i}" for i in range(1, len(widths) + 1))
        inputs = widths[0]
        for i, (name, size, depth) in enumerate(zip(self.stages, widths, depths, strict=True)):
            blocks = [
                Block(inputs, size, 2 if i else 1),
                *(Block(size, size, 1) for _ in range(depth - 1)),
            ]
            self.add_module(name, nn.Sequential(*blocks))
            inputs = size
        self.fc = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        if self.large:
            x = F.max_pool2d(x, 3, 2, 1)
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return self.fc(x.mean((2, 3)))


class Perceptron(nn.Module):
    """Linear layers ``fc1``, ``fc2`` ... with ReLU between them; an image is flattened first."""

    def __init__(self, input_shape: Shape, outputs: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden, outputs]
        self.layers = tuple(f"fc{i}" for i in range(1, len(widths)))
        for name, inputs, size in zip(self.layers, widths[:-1], widths[1:], strict=True):
            self.add_module(name, nn.Linear(inputs, size))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for name in self.layers[:-1]:
            x = F.relu(self.get_submodule(name)(x))
        return self.get_submodule(self.layers[-1])(x)


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn": Cnn,
    "cnn-large": CnnLarge,
    "resnet-small": lambda shape, outputs: ResNet(shape, outputs, (16, 32, 64), (1, 1, 1)),
    "resnet18": lambda shape, outputs: ResNet(shape, outputs, (64, 128, 256, 512), (2, 2, 2, 2)),
    "resnet34": lambda shape, outputs: ResNet(shape, outputs, (64, 128, 256, 512), (3, 4, 6, 3)),
    "mlp": lambda shape, outputs: Perceptron(shape, outputs, _HIDDEN[3]),
    "mlp-2": lambda shape, outputs: Perceptron(shape, outputs, _HIDDEN[2]),
    "mlp-3": lambda shape, outputs: Perceptron(shape, outputs, _HIDDEN[3]),
    "mlp-4": lambda shape, outputs: Perceptron(shape, outputs, _HIDDEN[4]),
    "mlp-5": lambda shape, outputs: Perceptron(shape, outputs, _HIDDEN[5]),
}


def names() -> tuple[str, ...]:
    """The networks that ``build`` knows by name."""
    return tuple(MODELS)


def build(name: str, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A network for records of one shape. ``name`` is one of ``names()`` or "package.module:callable".

    A callable is called with ``input_shape`` and ``outputs`` by these names where its signature has them, otherwise with as
    many of the two as it requires: none, ``outputs``, or both in this order. Modules are looked for in the current folder too.
    """
    shape = tuple(int(n) for n in input_shape)
    if not shape or min(shape) < 1 or outputs < 1:
        raise InputError(f"no network for records of shape {shape} and {outputs} outputs")
    if name in MODELS:
        return MODELS[name](shape, outputs)
    if ":" in name:
        return _custom(name, shape, outputs)
    near = difflib.get_close_matches(name, MODELS, n=1)
    guess = f" Did you mean {near[0]}?" if near else ""
    raise InputError(
        f"unknown model {name!r}.{guess} Known: {', '.join(MODELS)}; or give package.module:callable"
    )


def default_for(dataset: Dataset) -> str:
    """The network that is used when none is named."""
    shape = dataset.input_shape
    if len(shape) != 3:
        return "mlp"
    if dataset.name.startswith("imagenet") or min(shape[1:]) >= 96:
        return "resnet18"
    return "cnn" if shape[0] == 1 or min(shape[1:]) < 32 else "resnet-small"


def _custom(name: str, shape: Shape, outputs: int) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)  # a console script has its own folder there, not the user's
    try:
        maker: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            maker = getattr(maker, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"cannot find the model {name}: {error}") from error
    finally:
        sys.path.remove(here)
    if not callable(maker):
        raise InputError(f"the model {name} is not callable")
    arguments, keywords = _arguments(maker, name, shape, outputs)
    model = maker(*arguments, **keywords)
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _arguments(
    maker: Callable[..., Any], name: str, shape: Shape, outputs: int
) -> tuple[list[Any], dict[str, Any]]:
    """What the callable is called with, by its signature."""
    try:
        parameters = list(inspect.signature(maker).parameters.values())
    except (TypeError, ValueError):
        return [shape, outputs], {}
    offered = {"input_shape": shape, "outputs": outputs}
    named = {
        p.name: offered[p.name]
        for p in parameters
        if p.name in offered and p.kind is not p.POSITIONAL_ONLY
    }
    required = [
        p
        for p in parameters
        if p.default is p.empty
        and p.name not in named
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if named and not required:
        return [], named
    positional = [p for p in required if p.kind is not p.KEYWORD_ONLY]
    if named or len(positional) != len(required) or len(positional) > 2:
        wanted = ", ".join(p.name for p in required)
        raise InputError(f"{name} needs {wanted}; a model is called with (input_shape, outputs)")
    return ([], [outputs], [shape, outputs])[len(positional)], {}


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels // 4), channels)


def _image(shape: Shape, name: str, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise InputError(f"{name} is for images; records of shape {shape} need an mlp")
    if min(shape[1:]) < smallest:
        raise InputError(
            f"{name} needs images of at least {smallest}x{smallest} pixels, not {shape[1]}x{shape[2]}"
        )
    return shape[0], shape[1], shape[2]


def _after(side: int, convolution: nn.Conv2d) -> int:
    """The side of an image behind a convolution."""
    kernel, stride, padding = (
        convolution.kernel_size[0],
        convolution.stride[0],
        int(convolution.padding[0]),
    )
    return (side + 2 * padding - kernel) // stride + 1

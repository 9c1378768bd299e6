"""The networks of the paper and of the command line, by name.

Every layer treats each record by itself (GroupNorm, no BatchNorm), so all of them can be trained
privately. Layers that a spectral probe reads have the paper's names: conv1, conv2, fc1, fc2; stem,
layer1 ... layer4, fc.
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

from ._pooling import max_pool
from .errors import InputError

if TYPE_CHECKING:
    from .data import Dataset

Shape = tuple[int, ...]

# Hidden widths of the perceptrons, by number of linear layers.
_HIDDEN = {2: (128,), 3: (128, 64), 4: (256, 128, 64), 5: (256, 128, 64, 32)}


class Cnn(nn.Module):
    """The network of Opacus's MNIST example: two large convolutions, two linear layers.

    Images below 16 pixels are too small for kernels of 8: for them both kernels are 3x3, and only
    the second convolution has a stride.

    Args:
        input_shape: (channels, height, width), at least 6x6 pixels.
        outputs: Number of output columns.
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
        """Outputs of shape (rows, outputs) for images of shape (rows, channels, height, width)."""
        x = max_pool(F.relu(self.conv1(x)), 1)
        x = max_pool(F.relu(self.conv2(x)), 1)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class CnnLarge(nn.Module):
    """Two 3x3 convolutions of 32 and 64 channels with max pooling, and two linear layers.

    Args:
        input_shape: (channels, height, width), at least 4x4 pixels.
        outputs: Number of output columns.
    """

    def __init__(self, input_shape: Shape, outputs: int) -> None:
        super().__init__()
        channels, height, width = _image(input_shape, "cnn-large", 4)
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * (height // 4) * (width // 4), 128)
        self.fc2 = nn.Linear(128, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of shape (rows, outputs) for images of shape (rows, channels, height, width)."""
        x = max_pool(F.relu(self.conv1(x)), 2)
        x = max_pool(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Block(nn.Module):
    """Residual block: two 3x3 convolutions with GroupNorm, and a shortcut.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        stride: Stride of the first convolution and of the shortcut.
    """

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
        """Feature maps of shape (rows, outputs, height / stride, width / stride), rounded up."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, stages ``layer1``, ``layer2`` ... of residual blocks, global mean pooling, and ``fc``.

    The stem is 3x3 with stride 1 and no pooling, as is usual for 32x32 images. From 96 pixels on it
    is that of the published ResNets: 7x7 with stride 2, then max pooling.

    Args:
        input_shape: (channels, height, width).
        outputs: Number of output columns.
        widths: Channels of each stage.
        depths: Number of blocks of each stage.
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
        """Outputs of shape (rows, outputs) for images of shape (rows, channels, height, width)."""
        x = F.relu(self.norm(self.stem(x)))
        if self.large:
            x = F.max_pool2d(x, 3, 2, 1)
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return self.fc(x.mean((2, 3)))


class Perceptron(nn.Module):
    """Linear layers ``fc1``, ``fc2`` ... with ReLU between them; an image is flattened first.

    Args:
        input_shape: Shape of one record.
        outputs: Number of output columns.
        hidden: Widths of the hidden layers.
    """

    def __init__(self, input_shape: Shape, outputs: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        widths = [math.prod(input_shape), *hidden, outputs]
        self.layers = tuple(f"fc{i}" for i in range(1, len(widths)))
        for name, inputs, size in zip(self.layers, widths[:-1], widths[1:], strict=True):
            self.add_module(name, nn.Linear(inputs, size))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of shape (rows, outputs) for records of shape (rows, ...)."""
        x = x.flatten(1)
        for name in self.layers[:-1]:
            x = F.relu(self.get_submodule(name)(x))
        return self.get_submodule(self.layers[-1])(x)


class Linear(nn.Module):
    """One linear layer, ``fc``, that starts at zero: a head for fixed features.

    From zero the first gradients don't depend on chance, and no noise is spent on undoing it.

    Args:
        input_shape: Shape of one record.
        outputs: Number of output columns.
        bias: False where the features have a small constant column: a bias would take half of
            each clipped gradient's squared length, and gain nothing.
    """

    def __init__(self, input_shape: Shape, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(math.prod(input_shape), outputs, bias=bias)
        for parameter in self.fc.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of shape (rows, outputs) for records of shape (rows, ...)."""
        return self.fc(x.flatten(1))


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn": Cnn,
    "cnn-large": CnnLarge,
    "resnet-small": lambda shape, outputs: ResNet(shape, outputs, (16, 32, 64), (1, 1, 1)),
    "resnet18": lambda shape, outputs: ResNet(shape, outputs, (64, 128, 256, 512), (2, 2, 2, 2)),
    "resnet34": lambda shape, outputs: ResNet(shape, outputs, (64, 128, 256, 512), (3, 4, 6, 3)),
    "linear": Linear,
    "head": lambda shape, outputs: Linear(shape, outputs, bias=False),
    "mlp": lambda shape, outputs: Perceptron(shape, outputs, _HIDDEN[3]),
    "mlp-2": lambda shape, outputs: Perceptron(shape, outputs, _HIDDEN[2]),
    "mlp-3": lambda shape, outputs: Perceptron(shape, outputs, _HIDDEN[3]),
    "mlp-4": lambda shape, outputs: Perceptron(shape, outputs, _HIDDEN[4]),
    "mlp-5": lambda shape, outputs: Perceptron(shape, outputs, _HIDDEN[5]),
}


def names() -> tuple[str, ...]:
    """The names that ``build`` accepts."""
    return tuple(MODELS)


def build(name: str, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Builds a network for records of one shape.

    Args:
        name: One of ``names()``, or "package.module:callable". The module may be in the current
            folder. The callable gets ``input_shape`` and ``outputs`` as keywords if its signature
            has these names. Otherwise it gets as many positional arguments as it requires: none,
            ``outputs``, or ``input_shape`` and ``outputs``.
        input_shape: Shape of one record, without the batch dimension.
        outputs: Number of output columns.

    Returns:
        The network, with fresh weights from torch's generator.

    Raises:
        InputError: The name is unknown, the network does not fit the shape, or the callable cannot
            be imported or called.

    Examples:
        >>> build("mlp-2", (14,), 1).fc2.out_features
        1
    """
    shape = tuple(int(n) for n in input_shape)
    if not shape or min(shape) < 1 or outputs < 1:
        raise InputError(f"no network for records of shape {shape} and {outputs} outputs")
    if name in MODELS:
        return MODELS[name](shape, outputs)
    check(name)
    return _custom(name, shape, outputs)


def check(name: str) -> None:
    """Raises ``InputError`` for a name that ``build`` does not know; nothing is imported."""
    if name in MODELS or ":" in name:
        return
    near = difflib.get_close_matches(name, MODELS, n=1)
    guess = f" Did you mean {near[0]}?" if near else ""
    raise InputError(
        f"unknown model {name!r}.{guess} Known: {', '.join(MODELS)}; "
        "or give package.module:callable"
    )


def default_for(dataset: Dataset) -> str:
    """The name of the network that a run uses if none is given."""
    shape = dataset.input_shape
    if len(shape) != 3:
        return "mlp"
    if dataset.name.startswith("imagenet") or min(shape[1:]) >= 96:
        return "resnet18"
    return "cnn" if shape[0] == 1 or min(shape[1:]) < 32 else "resnet-small"


def imported(name: str, what: str) -> Any:
    """The object that ``package.module:object`` names; the working directory is searched too.

    Args:
        name: Where it is.
        what: What it is, for the message.

    Raises:
        InputError: It can't be imported.
    """
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)  # a console script has its own folder in sys.path[0], not the user's
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"cannot find the {what} {name}: {error}") from error
    finally:
        sys.path.remove(here)
    return found


def _custom(name: str, shape: Shape, outputs: int) -> nn.Module:
    maker = imported(name, "model")
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
    """Positional and keyword arguments for the callable, by its signature."""
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
            f"{name} needs images of at least {smallest}x{smallest} pixels, "
            f"not {shape[1]}x{shape[2]}"
        )
    return shape[0], shape[1], shape[2]


def _after(side: int, convolution: nn.Conv2d) -> int:
    """The side length of an image after a convolution."""
    kernel, stride, padding = (
        convolution.kernel_size[0],
        convolution.stride[0],
        int(convolution.padding[0]),
    )
    return (side + 2 * padding - kernel) // stride + 1

"""The networks of the speed and memory tables, each with the shape of its data and its batch.

``TABLE`` names the six of the table in the README; ``MODELS`` has more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sequences import Decoder, TextLstm, Vit, WideResNet
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Two 3x3 convolutions and two linear layers, for 28x28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Perceptron(nn.Module):
    """Three linear layers, for a table of 105 columns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(105, 256)
        self.fc2 = nn.Linear(256, 256)
        self.fc3 = nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class MnistExample(nn.Module):
    """The network of Opacus's MNIST example: large kernels, 26 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Residual(nn.Module):
    """Two 3x3 convolutions with group norm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.GroupNorm(groups, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A 3x3 stem and stages of residual blocks; each stage but the first halves the image."""

    def __init__(self, widths: tuple[int, ...], depth: int, groups: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(groups, widths[0])
        blocks = []
        for stage, outputs in enumerate(widths):
            for block in range(depth):
                inputs = widths[max(0, stage - 1)] if block == 0 else outputs
                blocks.append(Residual(inputs, outputs, 2 if stage and block == 0 else 1, groups))
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.fc(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Encoder(nn.Module):
    """torch's transformer encoder over 48 vectors of width 128, and a linear head on their mean."""

    def __init__(self, feedforward: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, dim_feedforward=feedforward, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.head(self.encoder(x).mean(1))


@dataclass(frozen=True)
class Model:
    """A network, what it is called in tables, and the shape of one record.

    With a ``vocabulary`` a record is a text of tokens. Without ``classes`` its labels are the next
    tokens.
    """

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int
    vocabulary: int = 0

    def data(self, records: int) -> tuple[Tensor, Tensor]:
        """Random records and labels."""
        if not self.vocabulary:
            return torch.randn(records, *self.shape), torch.randint(0, self.classes, (records,))
        ids = torch.randint(0, self.vocabulary, (records, self.shape[0] + 1))
        labels = torch.randint(0, self.classes, (records,)) if self.classes else ids[:, 1:]
        return ids[:, :-1].clone(), labels.clone()

    @staticmethod
    def loss(out: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy, over records or over all tokens."""
        return F.cross_entropy(out.flatten(0, -2), labels.flatten())


MODELS = {
    "cnn": Model("CNN conv32-conv64, fc 3136-128-10, 28x28", ConvNet, (1, 28, 28), 10, 256),
    "mlp": Model("MLP 105-256-256-2", Perceptron, (105,), 2, 256),
    "resnet": Model(
        "ResNet, GroupNorm, 16-32-64, 32x32",
        lambda: ResNet((16, 32, 64), 1, 8),
        (3, 32, 32),
        10,
        128,
    ),
    "mnist": Model("Opacus's MNIST example net, 28x28", MnistExample, (1, 28, 28), 10, 256),
    "transformer": Model(
        "TransformerEncoder, 2 x d 128, 48 tokens", lambda: Encoder(2048), (48, 128), 10, 64
    ),
    "resnet18": Model(
        "ResNet-18, GroupNorm, 3x3 stem, 32x32",
        lambda: ResNet((64, 128, 256, 512), 2, 32),
        (3, 32, 32),
        10,
        32,
    ),
    # torch's default feed-forward width of 2048 is 16 times d here; 4 times is usual.
    "transformer-512": Model(
        "the same with feed-forward 512", lambda: Encoder(512), (48, 128), 10, 64
    ),
    "decoder": Model(
        "decoder, 6 x d 384, 128 tokens of 8,192",
        lambda: Decoder(6, 384, 6, 128, 8192),
        (128,),
        0,
        8,
        8192,
    ),
    "decoder-lora": Model(
        "the same, LoRA of rank 8 on attention",
        lambda: Decoder(6, 384, 6, 128, 8192, rank=8),
        (128,),
        0,
        8,
        8192,
    ),
    "gpt2": Model(
        "GPT-2 small, 64 tokens of 50,257, tied",
        lambda: Decoder(12, 768, 12, 64, 50257, tied=True),
        (64,),
        0,
        2,
        50257,
    ),
    "vit-tiny": Model("ViT-tiny, 224x224", Vit, (3, 224, 224), 10, 32),
    "wrn-16-4": Model("WRN-16-4, GroupNorm, 32x32", WideResNet, (3, 32, 32), 10, 32),
    "lstm": Model("LSTM 128-256, 64 tokens of 8,192", TextLstm, (64,), 2, 64, 8192),
}
SEQUENCES = ("decoder", "decoder-lora", "gpt2", "vit-tiny", "wrn-16-4", "lstm")
TABLE = ("cnn", "mlp", "resnet", "mnist", "transformer", "resnet18")

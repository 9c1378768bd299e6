"""Networks that tests train: the ones of the speed table at small size, and awkward ones."""

import torch
import torch.nn.functional as F
from torch import nn


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 49, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x), inplace=True), 2)
        x = F.max_pool2d(F.relu(self.conv2(x), inplace=True), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class OpacusExample(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)
        self.fc1 = nn.Linear(32 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.view(-1, 512))))


class Block(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, outer)
        self.short = nn.Identity()
        if stride != 1 or inner != outer:
            self.short = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.GroupNorm(4, outer)
            )

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.short(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, width=8, blocks=(1, 2, 4)):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(4, width)
        widths = [width * b for b in blocks]
        pairs = zip([width, *widths[:-1]], widths, strict=True)
        self.layers = nn.Sequential(*(Block(a, b, 1 if a == b else 2) for a, b in pairs))
        self.fc = nn.Linear(widths[-1], 10)

    def forward(self, x):
        return self.fc(self.layers(F.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Words(nn.Module):
    """An embedding, a layer that is used twice, and a linear layer over a sequence."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 20, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x):
        h = self.norm(self.embed(x))
        h = torch.tanh(self.mix(torch.tanh(self.mix(h))))
        return self.out(h.mean(1))


class Encoder(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class Scaled(nn.Module):
    """A parameter of its own beside a child: no rule, so the whole of it takes the general path."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.fc = nn.Linear(6, 10)

    def forward(self, x):
        return self.fc(torch.tanh(x * self.scale))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.GRU, **options):
        super().__init__()
        self.rnn = kind(6, 5, batch_first=True, **options)
        self.fc = nn.Linear(5, 10)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.fc(out[:, -1])


MODELS = {
    "cnn": (CNN, lambda n: torch.randn(n, 1, 28, 28)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(20, 16), nn.ReLU(inplace=True), nn.Linear(16, 10)),
        lambda n: torch.randn(n, 20),
    ),
    "opacus-example": (OpacusExample, lambda n: torch.randn(n, 1, 28, 28)),
    "resnet": (ResNet, lambda n: torch.randn(n, 3, 16, 16)),
    "resnet-late": (lambda: ResNet(8, (1, 4, 12)), lambda n: torch.randn(n, 3, 8, 8)),
    "transformer": (Encoder, lambda n: torch.randn(n, 9, 16)),
    "words": (Words, lambda n: torch.randint(0, 20, (n, 7))),
    "words-tied": (lambda: Words(tied=True), lambda n: torch.randint(0, 20, (n, 7))),
    "raw-parameter": (Scaled, lambda n: torch.randn(n, 6)),
    "gru": (Recurrent, lambda n: torch.randn(n, 4, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2), lambda n: torch.randn(n, 4, 6)),
}

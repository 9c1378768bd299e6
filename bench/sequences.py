"""The language models, the vision transformer and the LSTM of the speed and memory tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return self.layer(x) + self.up(self.down(x))


class Attention(nn.Module):
    """Self-attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv: nn.Module = nn.Linear(width, 3 * width)
        self.out: nn.Module = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Every position's mixture of the others."""
        batch, positions, width = x.shape
        shape = (batch, positions, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, positions, width))


class Block(nn.Module):
    """Attention and two linear layers, each after a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Decoder(nn.Module):
    """A decoder-only language model; ``rank`` freezes all but adapters on the attention."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        tokens: int,
        vocabulary: int,
        tied: bool = False,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads, True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.table.weight
        if rank is not None:
            self.requires_grad_(False)
            for block in self.blocks:
                attention = block.attention
                attention.qkv = LowRank(attention.qkv, rank)
                attention.out = LowRank(attention.out, rank)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.head(self.norm(self.blocks(self.table(ids) + self.places(places))))


class Vit(nn.Module):
    """ViT-tiny on 224x224 pictures: patches of 16, 12 layers of width 192, mean of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 16, 16)
        self.places = nn.Embedding(196, 192)
        self.blocks = nn.Sequential(*(Block(192, 3, False) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        places = torch.arange(patches.shape[1], device=x.device).expand(len(x), -1)
        return self.head(self.norm(self.blocks(patches + self.places(places))).mean(1))


class TextLstm(nn.Module):
    """An embedding, one LSTM and a linear head on the mean of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(8192, 128), nn.LSTM(128, 256, batch_first=True)
        self.head = nn.Linear(256, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """The logits."""
        return self.head(self.lstm(self.table(ids))[0].mean(1))


class Wide(nn.Module):
    """A block of a wide residual network: norm and activation come before each convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, inputs), nn.GroupNorm(16, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = F.relu(self.norm1(x))
        return self.conv2(F.relu(self.norm2(self.conv1(y)))) + self.shortcut(
            x if isinstance(self.shortcut, nn.Identity) else y
        )


class WideResNet(nn.Module):
    """WRN-16-4 with group norm, for 32x32 pictures."""

    def __init__(self) -> None:
        super().__init__()
        widths, blocks = (16, 64, 128, 256), []
        for stage in range(1, 4):
            for block in range(2):
                inputs = widths[stage - 1] if block == 0 else widths[stage]
                blocks.append(Wide(inputs, widths[stage], 2 if stage > 1 and block == 0 else 1))
        self.stem, self.blocks = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.Sequential(*blocks)
        self.norm, self.head = nn.GroupNorm(16, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3)))

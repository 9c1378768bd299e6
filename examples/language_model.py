"""A private language model in a plain loop: adapters (LoRA), and all weights, at the same ε.

    python examples/language_model.py                   # the model of the guide
    python examples/language_model.py --layers 2 --width 64 --records 200 --public-steps 30

A decoder is first trained without privacy on the source code of Python's own library, which plays
the role of public text, and gives the vocabulary. Then it is trained for three epochs on the help
texts that ship with Python (`pydoc_data`), which play the role of private text: a record is a
passage of some tokens. Losses are of passages that were held out.
"""

from __future__ import annotations

import argparse
import copy
import re
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zetaclip import PrivacyEngine

PIECE = re.compile(r" ?\w+|\s+|[^\w\s]")
DELTA = 1e-4


class Words:
    """A vocabulary of frequent pieces of public text; what it lacks is spelled in bytes."""

    def __init__(self, text: str, size: int) -> None:
        found = Counter(PIECE.findall(text)).most_common(size - 256)
        self.ids = {piece: 256 + number for number, (piece, _) in enumerate(found)}

    def rows(self, text: str, tokens: int) -> Tensor:
        """The text as passages of so many tokens, and one more to predict."""
        ids: list[int] = []
        for piece in PIECE.findall(text):
            known = self.ids.get(piece)
            ids += [known] if known is not None else list(piece.encode())
        usable = len(ids) // (tokens + 1) * (tokens + 1)
        return torch.tensor(ids[:usable]).view(-1, tokens + 1)


class Adapted(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return self.layer(x) + self.up(self.down(x))


class Block(nn.Module):
    """Causal attention and two linear layers, each after a norm and beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv: nn.Module = nn.Linear(width, 3 * width)
        self.out: nn.Module = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, -1, 64).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Decoder(nn.Module):
    """A decoder-only language model."""

    def __init__(self, layers: int, width: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        # One row of positions per record: a row that all share would have no record's gradient.
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.head(self.norm(self.blocks(self.table(ids) + self.places(places))))

    def adapted(self, rank: int) -> Decoder:
        """A copy of which only adapters on the attention are trained."""
        model = copy.deepcopy(self).requires_grad_(False)
        for block in model.blocks:
            block.qkv, block.out = Adapted(block.qkv, rank), Adapted(block.out, rank)
        return model


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """The mean over the tokens of all rows; each row has the same number of them."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, rows: Tensor) -> float:
    """The mean loss of held-out passages."""
    return sum(float(loss(model, some)) * len(some) for some in rows.split(8)) / len(rows)


def public_training(model: Decoder, rows: Tensor, steps: int) -> None:
    """Without privacy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model, rows[torch.randint(len(rows), (8,))])
        value.backward()
        optimizer.step()
        if (step + 1) % 25 == 0:
            print(f"  public text, step {step + 1} of {steps}: loss {value.item():.2f}", flush=True)


def private_training(
    model: Decoder, rows: Tensor, epsilon: float, epochs: int, rate: float
) -> float:
    """With privacy, in an ordinary loop; returns ε."""
    trained = [p for p in model.parameters() if p.requires_grad]
    batch = min(64, len(rows) // 4)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.AdamW(trained, lr=rate, weight_decay=0.0),
        data_loader=DataLoader(TensorDataset(rows), batch_size=batch),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=epochs,
        num_examples=len(rows),  # here the number of passages is public
        sample_rate=batch / len(rows),
        clipping=1.0,
        physical_batch_size=8,
    )
    for epoch in range(epochs):
        for (ids,) in loader:
            optimizer.zero_grad()
            loss(private, ids).backward()
            optimizer.step()
        print(f"  epoch {epoch + 1}: ε = {engine.get_epsilon(DELTA):.2f}", flush=True)
    return engine.get_epsilon(DELTA)


def main() -> None:
    """Trains the model on public text, then twice on private text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--tokens", type=int, default=128, help="of a record")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--records", type=int, default=1400, help="private passages at most")
    parser.add_argument("--public-steps", type=int, default=300)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*noise will dominate.*")

    from pydoc_data import topics

    torch.manual_seed(0)
    sources = sorted(Path(re.__file__).parent.parent.glob("*.py"))
    public = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in sources)
    words = Words(public, options.vocabulary)
    passages = words.rows("\n".join(topics.topics.values()), options.tokens)
    passages = passages[torch.randperm(len(passages))]
    held_out, private = passages[:64], passages[64 : 64 + options.records]
    model = Decoder(options.layers, options.width, options.tokens, options.vocabulary)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} weights, {len(private)} private records of {options.tokens} tokens")
    public_training(model, words.rows(public, options.tokens), options.public_steps)
    before = held_out_loss(model, held_out)

    for title, one, rate in (
        ("adapters of rank 8", model.adapted(8), 1e-2),
        ("all weights", copy.deepcopy(model), 1e-3),
    ):
        wall, processor = time.perf_counter(), time.process_time()
        epsilon = private_training(one, private, options.epsilon, options.epochs, rate)
        minutes = (time.perf_counter() - wall) / 60, (time.process_time() - processor) / 60
        print(
            f"{title}: loss {before:.3f} -> {held_out_loss(one, held_out):.3f}, ε = {epsilon:.2f} "
            f"at δ = {DELTA}, {minutes[0]:.1f} minutes ({minutes[1]:.1f} of processor time)"
        )


if __name__ == "__main__":
    main()

"""A complete private training script, to read from top to bottom and change.

    python examples/train.py                         # the bundled digits, ε = 3
    python examples/train.py --dataset=mnist --epochs=8 --epsilon=0.83
    python examples/train.py --resume=True           # after a crash: continues where it stopped

`zetaclip train` does the same and more: a run folder, verify, reports, your own data.
"""

import math
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from zetaclip import PrivacyEngine, Spectral
from zetaclip.data import load
from zetaclip.models import build

# -- settings; each can be given as --name=value
dataset = "digits"  # "mnist", "cifar10", "adult" ... ; see `zetaclip data list`
network = "cnn"
epsilon, delta = 3.0, 1e-5
accountant = "pld"  # or "prv", "rdp"
epochs = 30
batch_size = 256  # expected: every record is drawn with probability batch_size / N
physical_batch_size = 256  # limits memory; results don't change
lr = 1.0  # of a decoupled step: it does not depend on C
clip = 1.0  # the first C; the spectral controller changes it
period = 10  # updates between two probes of the weights
checkpoint = "private-run.pt"  # and private-run.pt.private, which must never be published
resume = False

if {"-h", "--help"} & set(sys.argv[1:]):
    settings = Path(__file__).read_text().split("# -- settings")[1].split("\n\n")[0]
    print(f"{__doc__}\nSettings{settings}")
    sys.exit()
for word in sys.argv[1:]:
    name, _, text = word.removeprefix("--").partition("=")
    if name not in globals() or not word.startswith("--"):
        sys.exit(f"unknown setting {word!r}")
    kind = type(globals()[name])
    globals()[name] = text == "True" if kind is bool else kind(text)
data = load(dataset)
assert data.nominal_size is not None and data.test is not None
model = build(network, tuple(data.train.x.shape[1:]), data.outputs)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
loader = DataLoader(TensorDataset(data.train.x, data.train.y), batch_size=batch_size)

engine = PrivacyEngine(accountant=accountant)
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=epsilon,
    target_delta=delta,
    epochs=epochs,
    clipping=Spectral(initial=clip, period=period),
    num_examples=data.nominal_size,  # the published size: the actual number is private
    physical_batch_size=physical_batch_size,
    decouple_lr=True,
)
steps = epochs * len(loader)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
start = 0
if resume and Path(checkpoint).exists():
    # The same batches and the same noise: repeated steps cost no privacy.
    saved = engine.load(checkpoint, replay=True)
    scheduler.load_state_dict(saved["scheduler"])
    start = math.ceil(engine.updates / len(loader))
else:
    # From now on every step is noted in the journal.
    engine.save(checkpoint, extra={"scheduler": scheduler.state_dict()})


@torch.no_grad()
def accuracy() -> float:
    """The accuracy on held-out records, which ε does not cover."""
    model.eval()
    right = sum(
        (model(x).argmax(1) == y).sum().item()
        for x, y in zip(data.test.x.split(1000), data.test.y.split(1000))
    )
    model.train()
    return right / len(data.test.y)


print(
    f"σ = {optimizer.noise_multiplier:.3f}, q = {loader.sample_rate:.5f}, {steps} steps,"
    f" {data.unit} is one record"
)
for epoch in range(start, epochs):
    began = time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)  # don't print it: the loss of a batch is private
        loss.backward()
        optimizer.step()  # clips each record's gradient, sums, and adds noise once
        if optimizer.stepped:  # False inside a logical batch of several chunks
            scheduler.step()
    engine.save(checkpoint, extra={"scheduler": scheduler.state_dict()})
    print(
        f"epoch {epoch + 1}/{epochs}  accuracy {100 * accuracy():.1f} %  "
        f"ε {engine.get_epsilon(delta):.2f}  C {optimizer.clip:.3f}  "
        f"{time.perf_counter() - began:.1f} s"
    )

engine.ledger.to_jsonl("ledger.jsonl")
print(engine.ledger.summary())

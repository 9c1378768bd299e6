"""One training step of one model: without privacy, with zetaclip, Opacus (three modes) and Opake.

Every contender gets its own network, the same batch and plain SGD, and returns a function that
takes one step: forward, backward, clip, noise, update. zetaclip's step uses its loader with q = 1,
as a user's loop does. Opacus's step is given the batch, so fetching a batch is in our time only.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from networks import Model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

HALF = ""  # bfloat16 by "autocast" or as the type of the "model"; the loss is in float32
OPAKE = ("opake",) if importlib.util.find_spec("opake") else ()  # needs `pip install opake`
PEERS = ("hooks", "functorch", "ghost", *OPAKE)
Step = Callable[[], None]


def trained(network: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [p for p in network.parameters() if p.requires_grad]


def made(model: Model) -> nn.Module:
    """A new network, in the type that is asked for."""
    return model.make().bfloat16() if HALF == "model" else model.make()


def answer(network: nn.Module, x: Tensor) -> Tensor:
    """The network's output, in float32."""
    if HALF == "model" and x.is_floating_point():
        x = x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=HALF == "autocast"):
        out: Tensor = network(x)
    return out.float()


def plain(model: Model, x: Tensor, y: Tensor) -> Step:
    """A step without privacy."""
    network = made(model)
    optimizer = torch.optim.SGD(trained(network), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(answer(network, x), y).backward()
        optimizer.step()

    return step


def ours(model: Model, x: Tensor, y: Tensor, physical: int | None = None, **options: Any) -> Step:
    """A step with zetaclip; ``options`` are for ``make_private``."""
    from zetaclip import PrivacyEngine

    network = made(model)
    network, optimizer, loader = PrivacyEngine(accountant="rdp", seed=0).make_private(
        module=network,
        optimizer=torch.optim.SGD(trained(network), lr=0.01),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=1.0,
        clipping=1.0,
        sample_rate=1.0,
        num_examples=len(x),
        physical_batch_size=physical,
        **options,
    )

    def step() -> None:
        for inputs, labels in loader:  # q = 1: an epoch is one logical batch
            optimizer.zero_grad()
            model.loss(answer(network, inputs), labels).backward()
            optimizer.step()

    return step


def opacus_private(
    network: nn.Module, loader: DataLoader, mode: str, **options: Any
) -> tuple[Any, Any, Any, Any]:
    """(module, optimizer, loader, criterion) as Opacus makes them in one of its modes."""
    import opacus
    from opacus.validators import ModuleValidator

    if ModuleValidator.validate(network):
        network = ModuleValidator.fix(network)  # nn.MultiheadAttention becomes Opacus's own
    criterion: Any = nn.CrossEntropyLoss()
    made = opacus.PrivacyEngine(accountant="rdp").make_private(
        module=network,
        optimizer=torch.optim.SGD(trained(network), lr=0.01),
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        **options,
    )
    if mode == "ghost":
        return made[0], made[1], made[3], made[2]
    return made[0], made[1], made[2], criterion


def opacus(model: Model, x: Tensor, y: Tensor, mode: str) -> Step:
    """A step with a mode of Opacus."""
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    network, optimizer, _, criterion = opacus_private(model.make(), loader, mode)

    def step() -> None:
        optimizer.zero_grad()
        out = network(x)
        # Ghost clipping must be told that the losses of a text's tokens are one record's.
        told = {"shape": out.shape[:-1]} if mode == "ghost" and out.dim() > 2 else {}
        criterion(out.flatten(0, -2), y.flatten(), **told).backward()
        optimizer.step()

    return step


def opake(model: Model, x: Tensor, y: Tensor) -> Step:
    """A step with Opake, which is functional: a gradient per record by vmap."""
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.random import key

    network = model.make()
    weights = {name: p for name, p in network.named_parameters() if p.requires_grad}

    def loss(weights: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        out = torch.func.functional_call(network, weights, (record.unsqueeze(0),))
        return model.loss(out, label.unsqueeze(0))

    gradient, clip_state = clipped_grad(
        loss, clipping_norm=1.0, normalize_by=len(x), batch_argnums=(1, 2)
    )
    noise, noise_state = gaussian_noise(noise_multiplier=1.0, key=key(0))
    states = [clip_state, noise_state]

    def step() -> None:
        detached = {name: p.detach() for name, p in weights.items()}
        clipped, states[0] = gradient(detached, x, y, state=states[0])
        noisy, states[1] = noise(clipped, states[1])
        with torch.no_grad():
            for name, change in noisy.pytree.items():
                weights[name].sub_(change, alpha=0.01)

    return step


def make(kind: str, model: Model, x: Tensor, y: Tensor) -> Step:
    """The contender of that name: "plain", "ours", or a mode of Opacus."""
    warnings.simplefilter("ignore")  # Opacus warns about hooks at every backward
    if kind == "plain":
        return plain(model, x, y)
    if kind == "opake":
        return opake(model, x, y)
    return ours(model, x, y) if kind == "ours" else opacus(model, x, y, kind)


def replaced_by_opacus(model: Model) -> bool:
    """Whether Opacus refuses the network and gets a version repaired by its own fixer."""
    from opacus.validators import ModuleValidator

    return bool(ModuleValidator.validate(model.make()))


def reason(problem: Exception) -> str:
    """Why a contender can't run a model, in one short line."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    text = f"{type(problem).__name__}: {lines[0] if lines else ''}"
    return text if len(text) <= 90 else text[:87] + "..."

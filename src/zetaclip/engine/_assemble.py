"""Puts the parts of a private run together, and joins the other processes if there are any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from ..control.base import bound_probe
from ..ledger import Ledger
from ..methods import Method, Plan
from ._batches import Batches
from ._configuration import configuration
from ._control_loop import ControlLoop
from ._group import Group, SingleProcess, ranks
from ._join import join
from ._loop import PrivateLoop
from ._private_module import PrivateModule
from ._release_log import ReleaseLog
from ._seed import Seed
from ._settings import Settings
from ._sharding import check_method
from ._state import RunState
from ._units import Units
from ._update import Update
from ._validation import claim, release


def assemble(
    model: PrivateModule,
    optimizer: Optimizer,
    dataset: Any,
    units: Units,
    settings: Settings,
    method: Method,
    plan: Plan,
    ledger: Ledger,
    seed: Seed,
    planned_steps: int | None,
) -> PrivateLoop:
    """The loop of a run that has released nothing yet, with its module and optimizer attached.

    If it fails, module and optimizer are as before: the user mends it and calls again.
    """
    with _claimed(model):
        layout, controller, rule = model.layout, method.controller, method.rule
        spread = layout.shards is not None
        if spread:
            check_method(method)
        control = ControlLoop(controller, bound_probe(controller, model.module, model.named))
        log = ReleaseLog(ledger)
        state = RunState(
            sampling=seed.key("sampling"),
            noise=seed.key("noise"),
            stream=seed.name("name"),
            control=controller.init(),
            rule=rule.init(layout.numel),
        )
        group: Group = SingleProcess(units.count)
        digest = None
        others = ranks()
        if others is not None:
            terms = configuration(settings, method, plan, optimizer, layout) | {
                "shapes": [tuple(parameter.shape) for parameter in layout.parameters],
                "rates": [float(part["lr"]) for part in optimizer.param_groups],
                "sharding": "" if model.sharding is None else model.sharding.described(),
            }
            tensors = list(model.tensors().values())
            state, log.name, digest = join(
                others, terms, dataset, units, tensors, state, log.name, spread
            )
            group = others
        rereads = (
            method.remember is not None
            or rule.remembers
            or (controller.probe is None and controller.reads_gradient)
        )
        loop = PrivateLoop(
            model=model,
            batches=Batches(dataset, settings, method, plan, planned_steps, group, units, digest),
            log=log,
            update=Update(optimizer, settings.decouple_lr, rereads),
            control=control,
            settings=settings,
            method=method,
            plan=plan,
            state=state,
        )
    loop.update.install()
    model.attach(loop.group)
    return loop


@contextmanager
def _claimed(model: PrivateModule) -> Iterator[None]:
    """The parameters belong to this run, unless the block fails."""
    claim(model.named)
    try:
        yield
    except BaseException:
        release(model.named.values())
        raise

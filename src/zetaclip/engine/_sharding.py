"""A module whose parameters are spread over the ranks by ``torch.distributed.fsdp.fully_shard``.

Between forwards a parameter is a ``DTensor`` that holds this rank's part of it. torch gathers the
whole of it, another object, for the forward and the backward of the part of the module that it
belongs to. A record is on one rank, which runs every layer on it, so the rank has the whole norm of
its own records; the sums are added up by their owners (``Mechanism.deliver``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..gradients import LayerCapture, Refusal
from ..gradients.layout import owned_rows
from ..methods import Method
from ._group import Ranks
from ._power import PowerIterations


class Sharding:
    """The sharded parts of one module.

    **Guarantee.** After ``rest`` every parameter in the module is the one that the optimizer holds,
    and nothing that was gathered before an update is used after it.
    """

    def __init__(self, module: nn.Module, parts: list[tuple[str, Any]]) -> None:
        self._parts = parts
        self.rest()
        self._names = {id(part): _names(module, part) for _, part in parts}
        self._usual: list[Any] = []  # how torch gathers weights and adds gradients up by itself
        self._whole: dict[int, nn.Parameter] = {}  # by id() of what it is gathered from

    @staticmethod
    def of(module: nn.Module) -> Sharding | None:
        """The sharding of this module; None if it is not sharded."""
        parts = [(name, part) for name, part in module.named_modules() if is_sharded(part)]
        return Sharding(module, parts) if parts else None

    def held(self) -> set[int]:
        """The parameters that ``fully_shard`` takes care of, by id()."""
        return {id(p) for _, part in self._parts for p in _own_parameters(part)}

    def described(self) -> str:
        """What is gathered together, and how long: the same on all ranks."""
        return ", ".join(
            f"{name or 'the module'} ({len(self._names[id(part)])} parameters"
            + "".join(", kept" for group in _groups(part) if group.post_forward_mesh_info is None)
            + ")"
            for name, part in self._parts
        )

    def rest(self) -> None:
        """Gives back what was gathered: parameters are those that the optimizer holds."""
        for _, part in self._parts:
            part.reshard()

    def refusals(
        self, module: nn.Module, trained: set[nn.Parameter], shadows: list[LayerCapture]
    ) -> Iterator[Refusal]:
        """What is spread in another way than the one that is supported."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            yield Refusal(
                "",
                "FSDP2",
                "it is sharded, but there is only one process; train it as "
                "it was before fully_shard",
            )
            return
        if PowerIterations.of(module) is not None:
            yield Refusal(
                "",
                "spectral norm",
                "it reads whole weights, of which each rank has a "
                "part; leave it out, or train the module as it was before fully_shard",
            )
        for name, part in self._parts:
            reason = _group_refusal(part)
            if reason is not None:
                yield Refusal(name, type(part).__name__, reason)
        for name, parameter in module.named_parameters():
            if parameter in trained and not is_spread(parameter):
                yield Refusal(
                    name,
                    "parameter",
                    "it is not sharded, and others are; call fully_shard(module) on the whole "
                    "module last, without ignored_params",
                )

        yield from self._inside(shadows)

    def _inside(self, shadows: list[LayerCapture]) -> Iterator[Refusal]:
        """Parts that would be gathered in the middle of a unit."""
        outer = {id(inner): shadow for shadow in shadows for inner in shadow.module.modules()}
        for name, part in self._parts:
            shadow = outer.get(id(part))
            if shadow is not None and shadow.module is not part:
                yield Refusal(
                    name,
                    type(part).__name__,
                    f"it is sharded by itself inside of {shadow.name}, which is one unit here; "
                    f"call fully_shard on {shadow.name} instead",
                )

    def attach(self, ranks: Ranks, shadows: list[LayerCapture]) -> None:
        """Finds what stands for each parameter in forward; a rank that is lost is named there."""
        whole = self._whole
        for _, part in self._parts:
            for group in _groups(part):
                usual = group._all_gather_comm, group._reduce_scatter_comm
                self._usual.append((group, *usual))
            part.set_custom_all_gather(_Gather(ranks))
            part.set_custom_reduce_scatter(_NoSum())
            names = {id(p): (inner, key) for p, inner, key in _places(part)}
            part.unshard()
            for old, (inner, key) in names.items():
                found = inner._parameters[key]
                assert found is not None
                whole[old] = found
            part.reshard()
        for shadow in shadows:
            shadow.gathered(whole)

    @contextmanager
    def whole(self, names: list[str] | None) -> Iterator[None]:
        """Inside, these parameters of the module are whole (None: all), on every rank."""
        gathered = [
            part
            for _, part in self._parts
            if names is None or self._names[id(part)].intersection(names)
        ]
        for part in gathered:
            part.unshard()
        try:
            yield
        finally:
            self.rest()

    def version(self, parameter: nn.Parameter) -> int:
        """Counts what was written to a parameter, to this rank's part, or to what was gathered.

        torch does not count what it writes there itself.
        """
        whole = self._whole.get(id(parameter))
        own = local(parameter)
        return parameter._version + own._version + (0 if whole is None else whole._version)

    def clear(self) -> None:
        """Removes the gradients that autograd has left with what was gathered."""
        for whole in self._whole.values():
            whole.grad = None

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Whether autograd has left one with what was gathered of a parameter."""
        whole = self._whole.get(id(parameter))
        return whole is not None and whole.grad is not None

    def detach(self) -> None:
        """torch gathers weights and adds gradients up by itself again."""
        for group, gather, reduce in self._usual:
            group._all_gather_comm, group._reduce_scatter_comm = gather, reduce
        self._usual = []


class _Memory:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Memory):
    """Gathers weights for ``fully_shard``, and finds out if a rank is lost."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._ranks.gather_weights(output_tensor, input_tensor, group)


class _NoSum(_Memory):
    """In place of torch's sum of raw gradients over the ranks, which are not sent.

    torch asks for it where a weight was used outside of its layer. The zeros become the ``.grad``
    that the guard refuses, on the rank that did so; the others are told.
    """

    def __call__(self, output_tensor: Tensor, **_: Any) -> None:
        output_tensor.zero_()


def is_sharded(part: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this very part."""
    return any(kind.__name__ == "FSDPModule" for kind in type(part).__mro__)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread over ranks; others as they are."""
    return tensor._local_tensor if is_spread(tensor) else tensor  # type: ignore[attr-defined]


def is_spread(tensor: Tensor) -> bool:
    """Whether ranks hold parts of this tensor (a ``DTensor``)."""
    return hasattr(tensor, "device_mesh")


def like(parameter: Tensor, own: Tensor) -> Tensor:
    """A tensor that is spread as the parameter is, of which this rank has ``own``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def gathered(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The whole of a tensor that is spread along its first dimension; a meeting of all ranks."""
    own, rows = local(tensor), tensor.shape[0]
    each = -(-rows // ranks.count)
    filled = own.new_zeros(each, *tensor.shape[1:])
    filled[: len(own)] = own
    whole = own.new_empty(ranks.count * each, *tensor.shape[1:])
    ranks.gather_weights(whole, filled, None)
    return whole[:rows]


def own_part_of(value: Any, parameter: Any) -> Any:
    """This rank's part of a whole tensor, spread as the parameter is; other values unchanged."""
    if not (isinstance(parameter, Tensor) and is_spread(parameter) and isinstance(value, Tensor)):
        return value
    if value.shape != parameter.shape:  # a counter of an optimizer, say
        return value
    first, last = owned_rows(value.shape[0], dist.get_rank(), dist.get_world_size())
    return like(parameter, value[first:last].clone())


def check_method(method: Method) -> None:
    """Refuses what reads, keeps or moves the whole vector, of which each rank has a part.

    Raises:
        ValueError: The method does.
    """
    rule, controller = method.rule, method.controller
    reads = controller.probe is None and controller.reads_gradient
    needs = {
        "its clip rule maps gradients by what it remembers of every coordinate": rule.maps,
        "its clip rule remembers releases": rule.remembers,
        "it remembers releases": method.remember is not None,
        "it takes several gradients per update": len(method.passes) > 1,
        "it moves the weights before the gradient": method.passes[0].perturb is not None,
        f"{type(controller).__name__} reads the whole private gradient": reads,
    }
    found = [text for text, holds in needs.items() if holds]
    if found:
        raise ValueError(
            f"method {method.name!r} can't train parameters that are spread over ranks "
            f"(fully_shard): {found[0]}. Train the module as it was before fully_shard, or use a "
            "fixed clipping norm"
        )


def _groups(part: Any) -> list[Any]:
    state = part._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g is not None] if found is None else found


def _own_parameters(part: Any) -> list[nn.Parameter]:
    return [one.sharded_param for group in _groups(part) for one in group.fsdp_params]


def _names(module: nn.Module, part: Any) -> set[str]:
    """The names in the module of what is gathered together with this part."""
    own = {id(p) for p in _own_parameters(part)}
    every = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in every if id(parameter) in own}


def _places(part: Any) -> Iterator[tuple[nn.Parameter, nn.Module, str]]:
    """Where the parameters are that are gathered together with this part."""
    own = {id(p) for p in _own_parameters(part)}
    for inner in part.modules():
        for key, parameter in inner._parameters.items():
            if id(parameter) in own:
                yield parameter, inner, key


def _group_refusal(part: Any) -> str | None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
    from torch.distributed.tensor import Shard

    groups = _groups(part)
    if not hasattr(part, "set_custom_all_gather"):
        return f"fully_shard of torch {torch.__version__} is too old; use torch 2.13 or newer"
    if len(groups) > 1:
        return "its parameters are on several meshes (shard_placement_fn); use one for all"
    for group in groups:
        if group.mp_policy != MixedPrecisionPolicy():
            return (
                "it has a mixed precision policy (mp_policy=), which is not supported; leave it "
                "out, and use torch.autocast or a bfloat16 module"
            )
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            return "it is offloaded (offload_policy=), which is not supported; leave that out"
        after = group.post_forward_mesh_info
        if after is not None and after.shard_mesh_size != dist.get_world_size():
            return (
                "reshard_after_forward is a number, which keeps parts of another size after "
                "forward; use True or False"
            )
        for one in group.fsdp_params:
            parameter = one.sharded_param
            mesh = parameter.device_mesh
            if mesh.ndim != 1 or mesh.mesh.tolist() != list(range(dist.get_world_size())):
                return (
                    "its mesh is not the line of all ranks (HSDP, tensor parallelism, or some of "
                    'the ranks); use init_device_mesh("cpu", (dist.get_world_size(),))'
                )
            if tuple(parameter.placements) != (Shard(0),):
                return (
                    f"a parameter is spread as {parameter.placements}, not along its first "
                    "dimension; leave shard_placement_fn out"
                )
    return None

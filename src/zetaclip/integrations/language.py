"""What transformers' models need to be trained one record at a time: layer rules, positions, and a loss per record."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from transformers.pytorch_utils import Conv1D
except ImportError as problem:
    raise ImportError(
        "zetaclip.integrations.transformers needs transformers: pip install 'zetaclip[transformers]'"
    ) from problem

from ..gradients import LAYER_RULES, layer_rule
from ..gradients.capture import Contributions, LayerCapture
from ..gradients.contributions import Dense, Outer, Single

IGNORED = -100  # a label that does not count
# Endings of classes whose logits predict the next label, and of those that predict the label itself.
CAUSAL = ("ForCausalLM", "LMHeadModel")
ALIGNED = ("ForMaskedLM", "ForTokenClassification")
# Models that look learned positions up in a row that all records share, unless they are given one row each. Others compute
# them per record, or learn none.
SHARED_POSITIONS = frozenset({"albert", "bert", "electra", "gpt2", "gpt_neo", "openai-gpt"})


def register_rules(model: nn.Module) -> None:
    """Registers layer rules for transformers' own layers in this model: ``Conv1D``, and the RMSNorm of its family.

    There are some hundred RMSNorm classes with two formulas. A class gets the rule if its forward is one of them, by trial.
    """
    if Conv1D not in LAYER_RULES:
        layer_rule(Conv1D, path="linear")(_conv1d)
    for kind in {type(part): part for part in model.modules()}.items():
        if kind[0] not in LAYER_RULES and _is_rms_norm(kind[1]):
            layer_rule(kind[0], path="rms norm", names=frozenset({"weight"}))(_rms_norm)


def _conv1d(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
    """y = x W + b: a linear layer with its weight transposed, so input and output gradient change places."""
    found: Contributions = {}
    if "weight" in shadow.parameters:
        if g.dim() == 2:
            found["weight"] = Single(g, x)
        else:
            found["weight"] = Outer(
                g.reshape(len(g), -1, g.shape[-1]), x.reshape(len(x), -1, x.shape[-1])
            )
    if "bias" in shadow.parameters:
        summed = g.reshape(len(g), -1, g.shape[-1]).sum(1)
        found["bias"] = Dense(summed, summed.shape[1:])
    return found


def _rms_norm(shadow: LayerCapture, g: Tensor, x: Tensor) -> Contributions:
    """y = x / rms(x) times w, or times 1 + w: the same gradient for w."""
    product = g * _normalized(x, _eps(shadow.module))
    summed = product.flatten(1, -2).sum(1) if product.dim() > 2 else product
    return {"weight": Dense(summed, summed.shape[1:])}


def _normalized(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _eps(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))


@torch.no_grad()
def _is_rms_norm(module: nn.Module) -> bool:
    name = type(module).__name__
    own = dict(module.named_parameters())
    weight = own.get("weight")
    if (
        not name.endswith(("RMSNorm", "T5LayerNorm"))
        or weight is None
        or len(own) > 1
        or weight.dim() != 1
    ):
        return False
    if not type(module).__module__.startswith("transformers."):
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, len(weight), generator=generator).to(weight.device, weight.dtype)
    try:
        y = module(x).double()
    except Exception:  # a forward that takes more than x is none of the two
        return False
    normalized = _normalized(x.double(), _eps(module))
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 0.05
    return any(
        torch.allclose(y, normalized * scale, rtol=tolerance, atol=tolerance)
        for scale in (weight.double(), 1 + weight.double())
    )


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def with_positions(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with ``position_ids`` of one row per record, where the model would otherwise share one row.

    A record's positions begin at its own first token. With padding on the left they would otherwise say how long the longest
    record of the batch is, to every record.
    """
    ids = inputs.get("input_ids")
    inner = unwrapped(model)
    if "position_ids" in inputs or ids is None or ids.dim() != 2:
        return inputs
    start = _first_token(inputs)
    left = start is not None and bool(start.any())
    if left and _counts_positions(inner):
        return inputs
    if left and "position_ids" not in inspect.signature(type(inner).forward).parameters:
        raise ValueError(
            f"the records are padded on the left, and {type(inner).__name__} takes no position_ids, so what it computes for a record "
            "could depend on the longest one of the batch: set tokenizer.padding_side = 'right'"
        )
    if (
        not left
        and getattr(getattr(inner, "config", None), "model_type", None) not in SHARED_POSITIONS
    ):
        return inputs
    rows = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    return {**inputs, "position_ids": rows if start is None else (rows - start).clamp_min(0)}


def _token_mask(inputs: dict[str, Any]) -> Tensor | None:
    """Which tokens are the records' own, as ``attention_mask`` says; None if it does not."""
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    return (
        mask != 0
        if isinstance(mask, Tensor) and ids is not None and mask.shape == ids.shape
        else None
    )


def _first_token(inputs: dict[str, Any]) -> Tensor | None:
    """Where each record begins, as a column."""
    mask = _token_mask(inputs)
    return None if mask is None else mask.to(torch.uint8).argmax(1, keepdim=True)


def _counts_positions(model: nn.Module) -> bool:
    """RoBERTa and its like count positions from the padding token, per record, in numbers of their own."""
    return any(hasattr(part, "create_position_ids_from_input_ids") for part in model.modules())


def padding_is_inert(
    parameters: list[nn.Parameter],
    loss: Callable[[dict[str, Any]], Tensor],
    batch: dict[str, Any],
    tolerance: float,
) -> bool:
    """Whether the gradient of a padded record is its gradient without the padding, by trial.

    ``batch`` holds records of different lengths, and ``loss`` is that of a model in evaluation mode. Without a record that is
    padded, or without a mask that says where, the answer is no. Not the losses are compared: those of a fresh head are nearly the
    same whatever it is given.
    """
    mask = _token_mask(batch)
    if mask is None:
        return False
    rows, length = mask.shape

    def gradient(inputs: dict[str, Any]) -> Tensor:
        found = torch.autograd.grad(loss(inputs), parameters, allow_unused=True)
        return torch.cat([g.flatten().float() for g in found if g is not None])

    tried = 0
    for i in (mask.any(1) & ~mask.all(1)).nonzero().flatten().tolist()[:4]:
        padded, bare = {}, {}
        for name, value in batch.items():
            own = isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows
            padded[name] = value[i : i + 1] if own else value
            bare[name] = (
                padded[name][:, mask[i]] if own and value.shape[1:2] == (length,) else padded[name]
            )
        with_it, without = gradient(padded), gradient(bare)
        if not float((with_it - without).norm()) <= tolerance * float(without.norm()):
            return False
        tried += bool(without.any())  # a record that is not trained on shows nothing
    return tried > 0


def shifts_labels(model: nn.Module) -> bool:
    """Whether position t predicts label t + 1; by the model's class, because nothing else in the library tells it for all."""
    inner = unwrapped(model)
    name = type(inner).__name__
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False) or name.endswith(
        ALIGNED
    ):
        return False
    if name.endswith(CAUSAL) and not name.endswith("WithLMHeadModel"):
        return True
    raise ValueError(
        f"whether {name} predicts its labels or the next ones is not known here; override compute_loss in a subclass of "
        "PrivateTrainer: a mean over the rows, each row's loss by itself"
    )


def record_loss(
    model: nn.Module, inputs: dict[str, Any], label_smoothing: float = 0.0, outputs: bool = False
) -> Any:
    """The mean over records of each record's own loss; with ``outputs`` also what the model returned.

    Labels of tokens (-100: not counted) are averaged within their record first: the models' own losses divide by the tokens of
    the whole batch, so that one record's weight would depend on the others. Labels of whole records take the model's own loss;
    -100 is refused there.

    **Guarantee.** The loss of a batch is the mean of the losses of its rows, each by itself, for token labels; ``check_parity``
    with this function as ``loss_fn`` shows it for a model as a whole. Padding that ``attention_mask`` marks, on either side, has
    no part in it, if the model masks it, too: no label on padding counts, and none that is predicted from it.
    **Edge cases.** A record without any label that counts has a loss of 0. Padding on the left is refused for a model that takes
    no ``position_ids``.
    """
    labels = inputs.get("labels")
    if labels is None:
        raise ValueError(
            f"the inputs ({', '.join(inputs)}) hold no labels; override compute_loss in a subclass of PrivateTrainer: a mean "
            "over the rows, each row's loss by itself"
        )
    if labels.dim() > 2 and not labels.is_floating_point():
        raise ValueError(
            f"labels of shape {tuple(labels.shape)}: the model's own loss would divide by what counts in the whole batch; override compute_loss in a "
            "subclass of PrivateTrainer: a mean over the rows, each row's loss by itself"
        )
    inputs = with_positions(model, inputs)
    of_tokens = labels.dim() == 2 and not labels.is_floating_point()
    if not of_tokens:
        if not labels.is_floating_point() and bool((labels == IGNORED).any()):
            raise ValueError(
                "a record's label is -100, which means that it does not count: the model's own loss divides by those that do, so that each one's weight "
                "would depend on the others. Take such records out, or override compute_loss in a subclass of PrivateTrainer"
            )
        returned = model(**inputs)
        return (returned.loss, returned) if outputs else returned.loss
    # An encoder-decoder makes the decoder's inputs out of the labels.
    kept = getattr(getattr(unwrapped(model), "config", None), "is_encoder_decoder", False)
    returned = model(**{name: value for name, value in inputs.items() if kept or name != "labels"})
    logits = returned.logits
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(labels.shape)}; override compute_loss in a "
            "subclass of PrivateTrainer: a mean over the rows, each row's loss by itself"
        )
    mask = (
        None if kept else _token_mask(inputs)
    )  # an encoder's mask says nothing about the decoder's labels
    if mask is not None and mask.shape == labels.shape:
        labels = labels.masked_fill(~mask, IGNORED)
    if shifts_labels(model):
        logits, labels = logits[:, :-1], labels[:, 1:]
        if mask is not None and mask.shape[1] == labels.shape[1] + 1:
            # The first token behind padding has nothing before it to be predicted from; alone it would not be predicted.
            labels = labels.masked_fill(~mask[:, :-1], IGNORED)
    each = F.cross_entropy(
        logits.float().transpose(1, 2),
        labels,
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    counted = (labels != IGNORED).to(each.dtype)
    loss = ((each * counted).sum(1) / counted.sum(1).clamp_min(1)).mean()
    return (loss, returned) if outputs else loss

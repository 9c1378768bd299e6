"""A run's network as a file for other programs, checked by running that file."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ._run import Run

# The largest difference between the run's answers and those of the file: of a probability, or of a
# number as a share of its range. Other programs round in another order.
TOLERANCE = 1e-4
_SIZES = (1, 5, 32)  # of the batches that the file is tried with

Answer = Callable[[Tensor], Tensor]


class Answering(nn.Module):
    """Prepared records in, answers out: probabilities of the classes, or a number in its range.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.model, self.task = run.model, run.task
        low, high = run.target_range or (-1.0, 1.0)
        self.low, self.high = float(low), float(high)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (records, classes), or (records,) for a regression."""
        outputs = self.model(x)
        if self.task == "regression":
            value = (outputs.squeeze(1) + 1.0) * ((self.high - self.low) / 2) + self.low
            return value.clamp(self.low, self.high)
        if self.task == "binary":
            share = outputs.sigmoid()
            return torch.cat((1.0 - share, share), dim=1)
        return outputs.softmax(dim=1)


def export(run: Run, path: str | os.PathLike[str], format: str = "onnx", rows: Any = None) -> float:
    """Writes a run's network for other programs, and tries the file.

    Args:
        run: The run.
        path: The file to write. It is replaced when the new one has been tried.
        format: A key of ``FORMATS``.
        rows: Records to try the file with, as in ``Run.predict``; default: made-up ones.

    Returns:
        The largest difference between the run's answers and those of the file, for a regression as
        a share of the target's range.

    Raises:
        InputError: The format is unknown, a package is missing, the network can't be exported, or
            the file gives other answers.

    **Guarantee.** The file holds the weights, what was fixed in advance, and the public part of
    model.json; nothing of the records. It costs no further ε.
    """
    if format not in FORMATS:
        raise InputError(f"unknown format {format!r}; there are: {', '.join(FORMATS)}")
    if run.task == "regression" and "target" not in run.description and format != "safetensors":
        raise InputError(
            "the range of the target was inferred from private data, and the file would hold it."
            " Declare target_bounds in a schema and train again, or export as safetensors"
        )
    x = run.made_up(max(_SIZES)) if rows is None else run.prepare(rows)
    answering = Answering(run).eval()
    target = Path(path)
    temporary = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        with _quiet():
            answer = FORMATS[format](run, answering, x, temporary)
            gap = _largest_gap(answering, answer, x)
        if not gap <= TOLERANCE:
            raise InputError(
                f"the {format} file was written but gives other answers than the run, by {gap:.3g}:"
                " it is not kept"
            )
        os.replace(temporary, target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return gap


def _largest_gap(answering: Answering, answer: Answer, x: Tensor) -> float:
    width = answering.high - answering.low if answering.task == "regression" else 1.0
    gap = 0.0
    with torch.no_grad():
        for size in dict.fromkeys((*_SIZES, len(x))):
            part = x[:size]
            found = answer(part)
            expected = answering(part)
            if found.shape != expected.shape:
                return float("inf")
            gap = max(gap, float((found - expected).abs().max()) / width)
    return gap


def _about(run: Run) -> dict[str, str]:
    """What travels in the file: the public description of the model, and what it cost."""
    cost = {"epsilon": run.epsilon, "delta": run.delta, "steps": run.steps}
    return {"zetaclip": json.dumps({**run.description, **cost}, ensure_ascii=False)}


def _onnx(run: Run, answering: Answering, x: Tensor, path: Path) -> Answer:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"{error}: pip install 'zetaclip[onnx]'") from error
    with _told("onnx"):
        program: Any = torch.onnx.export(
            answering,
            (_two(x),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("records")},),
            input_names=["x"],
            output_names=["value" if run.task == "regression" else "probabilities"],
            verbose=False,
        )
    program.model.metadata_props.update(_about(run))
    program.save(path, external_data=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda part: torch.from_numpy(session.run(None, {"x": part.numpy()})[0])


def _torchscript(run: Run, answering: Answering, x: Tensor, path: Path) -> Answer:
    with _told("torchscript"), torch.no_grad():
        traced: Any = torch.jit.trace(answering, _two(x))
    torch.jit.save(traced, str(path), _extra_files=_about(run))
    loaded: Answer = torch.jit.load(str(path))
    return loaded


def _torch_export(run: Run, answering: Answering, x: Tensor, path: Path) -> Answer:
    with _told("torch-export"):
        program = torch.export.export(
            answering, (_two(x),), dynamic_shapes=({0: torch.export.Dim("records")},)
        )
    with open(path, "wb") as file:  # a path would have to end in .pt2
        torch.export.save(program, file, extra_files=_about(run))
    with open(path, "rb") as file:
        loaded: Answer = torch.export.load(file).module()
    return loaded


def _safetensors(run: Run, answering: Answering, x: Tensor, path: Path) -> Answer:
    import copy

    from safetensors.torch import load_file, save_file

    state = {name: value.contiguous().clone() for name, value in run.model.state_dict().items()}
    save_file(state, path, _about(run))
    other = copy.deepcopy(answering)
    for value in other.model.state_dict().values():
        value.zero_()
    other.model.load_state_dict(load_file(path))
    return other


FORMATS: dict[str, Callable[[Run, Answering, Tensor, Path], Answer]] = {
    "onnx": _onnx,
    "torchscript": _torchscript,
    "torch-export": _torch_export,
    "safetensors": _safetensors,
}
ENDINGS = {
    "onnx": ".onnx",
    "torchscript": ".pt",
    "torch-export": ".pt2",
    "safetensors": ".safetensors",
}


def _two(x: Tensor) -> Tensor:
    """Records to export with: from a single one, torch would conclude that there is always one."""
    return x[:2] if len(x) > 1 else torch.cat((x, x))


@contextmanager
def _told(format: str) -> Iterator[None]:
    try:
        yield
    # The exporters raise many kinds of error, and all of them mean the same here.
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"this network can't be exported as {format}: {first[:300]}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' words about themselves."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            yield
    finally:
        logger.setLevel(level)

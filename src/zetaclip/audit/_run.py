"""An audit by one training run: canaries in or out by secret coins, and an attacker's guesses."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ConfigError
from ..training.config import Config
from ..training.evaluate import outputs_of
from ..training.fixed import applied, frozen
from ..training.progress import Display
from ..training.recipe import build_method, build_model, resolve
from ..training.records import load_data, nominal_size
from ..training.steps import PrivateSteps
from ._bounds import SURE, best_of_guesses, correct_guesses, f_dp, gaussian
from ._canaries import TranscriptSteps, with_wrong_labels

if TYPE_CHECKING:
    from ..data import Dataset
    from ..methods import Method

ATTACKERS = ("final", "transcript")


@dataclass(frozen=True)
class AuditResult:
    """What an audit found.

    Attributes:
        attacker: What the attacker saw: "final" (the trained model) or "transcript" (every
            released gradient).
        epsilon_claimed: ε of the run by its ledger.
        epsilon_found: With ``confidence``, ε is at least this.
        confidence: How often such a bound holds, at least, if the coins are tossed again.
        bound: Which bound ``epsilon_found`` is: "gaussian" or "one run".
        bounds: ε by each bound.
        canaries: The number of canaries.
        guesses: How many of them the attacker guessed.
        correct: How many guesses were right.
        excess: Whether more than the claimed ε was found at a confidence of 99.9 %.
        delta: δ of both.
        steps: Updates that were taken.
        sample_rate: q.
        noise_multiplier: σ.
        method: The method's name.
        scores: How many canaries have a score in each of 40 bins: ``edges``, ``included`` and
            ``excluded``.
    """

    attacker: str
    epsilon_claimed: float
    epsilon_found: float
    confidence: float
    bound: str
    bounds: dict[str, float]
    canaries: int
    guesses: int
    correct: int
    excess: bool
    delta: float
    steps: int
    sample_rate: float
    noise_multiplier: float
    method: str
    scores: dict[str, list[float]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in ``audit.json``."""
        return asdict(self)

    @property
    def meaning(self) -> str:
        """What was found, in one sentence."""
        if self.excess:
            return (
                f"The attacker found ε of at least {self.epsilon_found:.2f}, more than the claimed"
                f" {self.epsilon_claimed:.2f}: the claim is wrong, or the training was changed."
            )
        share = self.epsilon_found / self.epsilon_claimed if self.epsilon_claimed else 0.0
        return (
            f"The attacker could show ε of at least {self.epsilon_found:.2f}, {share:.0%} of the"
            f" claimed {self.epsilon_claimed:.2f}: nothing contradicts the claim."
        )


def audit(
    config: Config,
    *,
    canaries: int = 1000,
    attacker: str = "transcript",
    confidence: float = 0.99,
    display: Display | None = None,
) -> AuditResult:
    """Trains once with canaries and lets an attacker guess which of them were in the data.

    Args:
        config: The settings of the run, as for ``zetaclip train``.
        canaries: How many canaries. More give a tighter bound.
        attacker: "transcript" sees every released gradient; its canaries are gradients, orthogonal
            to each other and to all records. "final" sees the trained model and scores by loss; its
            canaries are training records with wrong labels.
        confidence: How often the bound holds, at least, if the coins are tossed again.
        display: Where progress is printed; default: nowhere.

    Returns:
        ε as claimed by the ledger, and the ε that the attacker could show.

    Raises:
        ConfigError: A setting can't be used.

    **Guarantee.** ``epsilon_found`` is a lower bound of the true ε with the given confidence, if
    the assumptions of its ``bound`` hold. It is never a proof that ε is small: a better attacker
    may find more.
    **Edge cases.** An audit trains a model of its own; its weights are thrown away. On private data
    the result of "transcript" costs the claimed ε like any other run. The result of "final" also
    depends on losses of private records, which ε does not cover: audit public or made-up data of
    the same shape.
    """
    if attacker not in ATTACKERS:
        raise ConfigError(f"attacker is one of {', '.join(ATTACKERS)}, not {attacker!r}")
    if canaries < 10:
        raise ConfigError(f"an audit needs at least 10 canaries, not {canaries}")
    if not 0.5 <= confidence < 1:
        raise ConfigError(f"confidence is at least 0.5 and below 1, not {confidence:g}")
    display = display or Display(quiet=True)
    dataset = load_data(config)
    method = build_method(config)
    config = resolve(config, dataset, method)
    # N without canaries: a run that took N from its data is audited at its own q and ε.
    config = replace(config, num_examples=nominal_size(config, dataset)[0])
    if not method.private:
        raise ConfigError(f"method {config.method!r} claims no ε, so there is nothing to audit")
    if attacker == "final" and dataset.owners is not None:
        raise ConfigError("attacker 'final' is for rows; units are audited by 'transcript'")
    if config.seed is not None:
        torch.manual_seed(config.seed)
    fixed = frozen(config, dataset, display.say)
    if fixed is not None:
        dataset = applied(fixed, dataset, display)
    rng = np.random.default_rng(config.seed)
    run = _transcript if attacker == "transcript" else _final
    display.say(f"training once with {canaries} canaries")
    with warnings.catch_warnings():
        # Coins decide how many records there are; the declared number stays as it is.
        warnings.filterwarnings("ignore", message="num_examples = ")
        steps, scores, included = run(config, dataset, method, canaries, rng, display)
    return _judged(attacker, steps, scores, included, confidence)


def _transcript(
    config: Config,
    dataset: Dataset,
    method: Method,
    canaries: int,
    rng: np.random.Generator,
    display: Display,
) -> tuple[PrivateSteps, np.ndarray, np.ndarray]:
    included = rng.integers(0, 2, canaries) == 1
    model = build_model(config, dataset)
    steps = TranscriptSteps(config, dataset, method, model, included)
    _train(steps, display)
    return steps, steps.scores, included


def _final(
    config: Config,
    dataset: Dataset,
    method: Method,
    canaries: int,
    rng: np.random.Generator,
    display: Display,
) -> tuple[PrivateSteps, np.ndarray, np.ndarray]:
    trained_on, made, included = with_wrong_labels(dataset, canaries, rng)
    steps = PrivateSteps(config, trained_on, method, build_model(config, dataset))
    _train(steps, display)
    with nullcontext() if steps.average is None else steps.average.applied():
        outputs = outputs_of(steps.model, made.train, steps.device)
    losses = steps.task.loss(outputs, made.train.y, reduction="none")
    return steps, -losses.double().numpy(), included


def _train(steps: PrivateSteps, display: Display) -> None:
    with display.bar(0, steps.total) as bar:
        while steps.done < steps.total:
            for done in steps.updates(steps.total):
                bar.step(done, dict)


def _judged(
    attacker: str,
    steps: PrivateSteps,
    scores: np.ndarray,
    included: np.ndarray,
    confidence: float,
) -> AuditResult:
    delta = steps.config.delta
    assert delta is not None
    claimed = steps.epsilon()
    if claimed is None:
        raise ConfigError("these settings claim no finite ε, so there is nothing to audit")

    def bounds(level: float) -> dict[str, tuple[float, int, int]]:
        found = {
            "one run": best_of_guesses(scores, included, delta, level),
            "f-dp": best_of_guesses(scores, included, delta, level, f_dp),
        }
        if attacker == "transcript":
            count = len(scores)
            right = correct_guesses(scores, included, count)
            found["gaussian"] = (gaussian(right, count, delta, level), count, right)
        return found

    found = bounds(confidence)
    # One bound is chosen before anything is seen: the largest of several would hold less often.
    name = "gaussian" if attacker == "transcript" else "one run"
    best, guesses, correct = found[name]
    return AuditResult(
        attacker=attacker,
        epsilon_claimed=claimed,
        epsilon_found=best,
        confidence=confidence,
        bound=name,
        bounds={key: value for key, (value, _, _) in found.items()},
        canaries=len(scores),
        guesses=guesses,
        correct=correct,
        excess=bounds(SURE)[name][0] > claimed,
        delta=delta,
        steps=steps.done,
        sample_rate=steps.sample_rate,
        noise_multiplier=float(steps.sigma),
        method=steps.method.name,
        scores=_histogram(scores, included),
    )


def _histogram(scores: np.ndarray, included: np.ndarray) -> dict[str, list[float]]:
    low, high = np.quantile(scores, [0.001, 0.999])
    edges = np.linspace(low, high if high > low else low + math.ulp(1.0), 41)
    inside = np.clip(scores, edges[0], edges[-1])
    counts = {
        name: np.histogram(inside[rows], edges)[0].tolist()
        for name, rows in (("included", included), ("excluded", ~included))
    }
    return {"edges": edges.tolist(), **counts}

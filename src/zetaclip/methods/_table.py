"""Every named method, each as one composition of the engine's parts.

    method = zetaclip.methods.get("dp-sam", rho=0.05)
    optimizer = method.optimizer(model.parameters())
    engine.make_private(..., optimizer=optimizer, method=method, noise_multiplier=z, epochs=8,
    target_delta=1e-5)

``noise_multiplier`` is z*, what DP-SGD would use; each method derives its own from it, so that all
cost the same. What a function below takes are the method's options; those of its optimizer
(momentum, betas, weight_decay) may be given too.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..clipping import AutoS, Counted, Important, Moments, Psac, Slack, Thinned, Whitened
from ..control import Constant, Paced, Quantile, SlackControl, Spectral
from ..control.base import check_inside
from ..words import near
from . import _plans as plans
from ._auto import CLIP_OF_GAIN, UNIT_GAIN
from ._composition import Method
from ._noise_plan import Pass, Plan
from ._updates import AlongLast, Ascend, defaults

MEANINGS = {
    "clip": "the clipping norm C, or where it starts",
    "rho": "how far the weights are perturbed",
    "ascent_batch": '"fresh": a batch of its own for the ascent; "same": both gradients from '
    "one batch, with more noise",
    "ascent_share": "the ascent's share of the precision, between 0 and 1",
    "cap": "candidates are drawn with cap times the sampling rate; above 1 the noise is solved "
    "anew",
    "unsound": "the published form; no privacy is claimed for it",
    "ratio": "the noise multiplier is multiplied by this after every epoch",
    "sigma_min": "the noise multiplier stays at or above this",
    "sigma_b": "noise of the private count; None: L/20, or 2z where that is more",
    "target": "the share of gradients that should not be clipped",
    "gain": "how fast log C moves",
    "bounds": "(lowest C, highest C)",
    "clip_rate": "the share of gradients that should be clipped",
    "band": "how far the clip rate may be off before the learning rate moves",
    "up": "factor on the learning rate while too few gradients are clipped",
    "down": "factor on the learning rate while too many are",
    "rate_bounds": "bounds of the product of those factors",
    "gamma": "added to every norm",
    "r": "where the weight of short gradients bends",
    "tau": "norms up to tau C count as short",
    "lower": "C never falls below this",
    "upper": "C never rises above this",
    "normalised": "divide the sum by C, so that C does not move the step size",
    "slots": "coordinates that the unused norm is written into",
    "beta": "how far the target falls with the share of very short gradients",
    "beta1": "decay of the released mean",
    "beta2": "decay of the released spread",
    "cap_spread": "keep the summed variance at most C²",
    "adapt": "False: no map, which is DP-SGD",
    "keep": "the share of coordinates that is trained after the first stage",
    "warmup": "the first stage's share of all steps",
    "whiten": "scale the kept coordinates by their released spread",
    "paper": "the paper's literal controller",
}


@dataclass(frozen=True)
class Entry:
    """A row of the table: what a method is, in words, and the function that composes it."""

    name: str
    make: Callable[..., Method]
    summary: str
    reads: str
    queries: str
    noise: str
    source: str

    def options(self) -> dict[str, tuple[Any, str]]:
        """Name -> (default, meaning)."""
        found: dict[str, tuple[Any, str]] = {}
        for name, parameter in inspect.signature(self.make).parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                spectral = inspect.signature(Spectral).parameters
                found |= {
                    key: (spectral[key].default, "as in zetaclip.Spectral")
                    for key in spectral
                    if key != "initial"
                }
            else:
                found[name] = (parameter.default, MEANINGS[name])
        return found


TABLE: dict[str, Entry] = {}

ONE_SUM = "1 sum, S = C"
GRADIENT = "the released gradient"


def _entry(
    name: str, source: str, *, reads: str = GRADIENT, queries: str = ONE_SUM, noise: str = "z*"
) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
    def add(make: Callable[..., Method]) -> Callable[..., Method]:
        summary = (make.__doc__ or "").strip().rstrip(".")
        TABLE[name] = Entry(name, make, summary, reads, queries, noise, source)
        return make

    return add


# -- without privacy

NOT_PRIVATE = {"reads": "the data", "queries": "none", "noise": "none"}


@_entry("sgd", "-", **NOT_PRIVATE)
def _sgd() -> Method:
    """Plain SGD, without privacy."""
    return Method(private=False, any_update=False, lr=0.1, paper_lr=0.1)


@_entry("adam", "-", **NOT_PRIVATE)
def _adam() -> Method:
    """Plain Adam, without privacy."""
    return Method(private=False, family="adam", any_update=False, lr=1e-3, paper_lr=1e-3)


# -- one clipped sum, another update


@_entry("auto", "zetaclip", reads="public numbers")
def _auto(clip: float | None = None) -> Method:
    """C and the step size follow from public numbers; nothing to tune."""
    # A larger C than the law's would only drown the gradients in noise.
    most = math.inf if clip is None else clip
    return Method(
        controller=Constant(min(most, CLIP_OF_GAIN * UNIT_GAIN)),
        family="auto",
        any_update=False,
        clip_by_update=most,
        fixed={"controller": "its C is fixed", "rule": "C is chosen for its rule"},
        paper_lr=1.0,
    )


@_entry("dp-sgd", "Abadi et al., CCS 2016")
def _dp_sgd(clip: float = 1.0) -> Method:
    """SGD on the clipped, noisy mean gradient."""
    return Method(controller=Constant(clip), any_update=False, paper_lr=0.25)


@_entry("dp-adam", "Kingma & Ba 2015 on private gradients")
def _dp_adam(clip: float = 1.0) -> Method:
    """Adam on the private gradient."""
    return Method(
        controller=Constant(clip), family="adam", any_update=False, lr=1e-3, paper_lr=1e-3
    )


@_entry("dp-adam-bc", "Tang, Shpilevskiy & Lécuyer, AAAI 2024")
def _dp_adam_bc(clip: float = 1.0) -> Method:
    """Adam with the noise's variance taken out of its second moment."""
    # A coordinate at the floor moves by lr / sqrt(floor) = 1 times its mean gradient, as dp-sgd
    # does.
    update = {"floor": 1e-6}
    return Method(
        controller=Constant(clip),
        family="adam-bc",
        any_update=False,
        update=update,
        lr=1e-3,
        paper_lr=1e-3,
    )


@_entry("dp-adamw", "Loshchilov & Hutter 2019 on private gradients")
def _dp_adamw(clip: float = 1.0) -> Method:
    """AdamW (decoupled weight decay) on the private gradient."""
    return Method(
        controller=Constant(clip), family="adamw", any_update=False, lr=1e-3, paper_lr=1e-3
    )


@_entry(
    "adp-adamw",
    "after Chilukoti et al. 2025 (arXiv 2502.11329); our reading",
    noise="s_e = s_0 ratio^e, s_0 solved",
)
def _adp_adamw(clip: float = 1.0, ratio: float = 0.99, sigma_min: float = 0.0) -> Method:
    """AdamW with noise that falls from epoch to epoch, all of it accounted."""
    check_inside("ratio", ratio, 0 < ratio <= 1, "above 0 and at most 1")
    check_inside("sigma_min", sigma_min, 0 <= sigma_min < math.inf, "at least 0")
    adamw = _dp_adamw(clip)
    if ratio == 1:
        return adamw
    return replace(
        adamw, plan=partial(plans.decaying, ratio=ratio, floor=sigma_min), needs_steps=True
    )


# -- another sample, another point


@_entry(
    "dp-is",
    "after Wei et al., CCS 2022 (DPIS); capped thinning is ours",
    queries="1 sum of directions, S = C",
    noise="z solved at q_max",
)
def _dp_is(clip: float = 1.0, cap: float = 1.0, unsound: bool = False) -> Method:
    """Records join in proportion to their clipped norm, and add their direction."""
    check_inside("cap", cap, 1 <= cap < math.inf, "at least 1")
    why = (
        "records are drawn with up to cap times the rate that the noise was chosen for"
        if unsound
        else ""
    )
    return Method(
        rule=Thinned(),
        controller=Constant(clip),
        plan=partial(plans.capped_rate, cap=cap, unsound=unsound),
        needs_steps=cap > 1 and not unsound,
        fixed={"rule": "joining by norm is the method"},
        unsound=why,
        paper_lr=0.25,
    )


@_entry(
    "dp-sam",
    "two-step baseline of Park et al., ICML 2023",
    queries="2 sums, S = C each",
    noise="fresh: z of 2T steps; same: √2 z* each",
)
def _dp_sam(
    clip: float = 1.0, rho: float = 0.05, ascent_batch: str = "fresh", ascent_share: float = 0.5
) -> Method:
    """The gradient at weights that a private ascent step has perturbed."""
    check_inside("rho", rho, 0 <= rho < math.inf, "at least 0")
    check_inside("ascent_share", ascent_share, 0 < ascent_share < 1, "between 0 and 1")
    if ascent_batch not in ("fresh", "same"):
        raise ValueError(f"ascent_batch must be 'fresh' or 'same', not {ascent_batch!r}")
    # The second pass names where its records come from; with "fresh" both passes draw a batch of
    # their own.
    fresh = ascent_batch == "fresh"
    return Method(
        controller=Constant(clip),
        passes=(Pass("ascent"), Pass("descent", batch=ascent_batch, perturb=Ascend(rho))),
        plan=partial(plans.two_batches if fresh else plans.same_batch, share=ascent_share),
        needs_steps=fresh,
        paper_lr=0.25,
    )


@_entry("dp-sat", "Park, Kim, Choi & Lee, ICML 2023", reads="this and the last released gradient")
def _dp_sat(clip: float = 1.0, rho: float = 0.05) -> Method:
    """The gradient at weights perturbed along the last released gradient."""
    check_inside("rho", rho, 0 <= rho < math.inf, "at least 0")
    last = AlongLast(rho)
    return Method(
        controller=Constant(clip),
        passes=(Pass(perturb=last if rho else None),),
        remember=last.remember if rho else None,
        paper_lr=0.25,
    )


# -- another clip rule

NO_NORM = {
    "controller": "every gradient is stretched or shrunk to about one length, so C only scales "
    "the step"
}


@_entry("auto-s", "Bu et al., NeurIPS 2023")
def _auto_s(clip: float = 1.0, gamma: float = 0.01) -> Method:
    """Every gradient is normalised; no clipping norm to tune."""
    check_inside("gamma", gamma, 0 < gamma < math.inf, "positive")
    fixed = {**NO_NORM, "rule": "normalising is the method"}
    return Method(rule=AutoS(gamma), controller=Constant(clip), fixed=fixed, paper_lr=0.25)


@_entry("dp-psac", "Xia et al., AAAI 2023")
def _dp_psac(clip: float = 1.0, r: float = 0.1) -> Method:
    """Normalised like auto-s, but tiny gradients stay tiny."""
    check_inside("r", r, 0 < r < math.inf, "positive")
    fixed = {**NO_NORM, "rule": "its weights are the method"}
    return Method(rule=Psac(r), controller=Constant(clip), fixed=fixed, paper_lr=0.25)


@_entry(
    "adaclip",
    "Pichapati et al. 2019",
    reads="released gradients",
    queries="1 sum in scaled coordinates, S = C",
)
def _adaclip(
    clip: float = 1.0,
    beta1: float = 0.99,
    beta2: float = 0.9,
    cap_spread: bool = True,
    adapt: bool = True,
) -> Method:
    """Clips in coordinates that are scaled by their released spread."""
    _decays(beta1, beta2)
    return _whitening(
        Whitened(Moments(beta1, beta2, cap=cap_spread), adapt), clip, plans.told_batch_size
    )


@_entry(
    "adadpigu",
    "after Zhang & Xie 2025",
    reads="released gradients",
    queries="1 sum over kept coordinates, S = C",
)
def _adadpigu(
    clip: float = 1.0,
    keep: float = 0.6,
    warmup: float = 0.2,
    beta1: float = 0.9,
    beta2: float = 0.999,
    cap_spread: bool = True,
    whiten: bool = True,
) -> Method:
    """DP-SGD first, then only the coordinates whose released gradients were largest.

    These are scaled by their spread.
    """
    _decays(beta1, beta2)
    check_inside("keep", keep, 0 < keep <= 1, "above 0 and at most 1")
    check_inside("warmup", warmup, 0 < warmup <= 1, "above 0 and at most 1")
    rule = Important(keep, Moments(beta1, beta2, 1e-6, 1e6, cap_spread), whiten)
    return replace(_whitening(rule, clip, partial(plans.two_stages, warmup=warmup)), paper_lr=0.1)


# -- a norm that moves

COUNT = {
    "queries": "1 sum, S = C; 1 count, S = 1/2",
    "noise": "sum (z*⁻² - (2σ_b)⁻²)^(-1/2), count 2σ_b",
}
OWN_SIGNAL = {
    "rule": "its controller reads what its rule releases",
    "controller": "the query that it pays for would be read by nobody",
}


@_entry(
    "dp-adam-ac",
    "after Yang 2025 (arXiv 2510.05288); sound form",
    reads="the released gradient and the noisy count",
    **COUNT,
)
def _dp_adam_ac(
    clip: float = 3.0,
    clip_rate: float = 0.2,
    gain: float = 0.2,
    sigma_b: float | None = None,
    bounds: tuple[float, float] = (0.1, 10.0),
    band: float = 0.1,
    up: float = 1.01,
    down: float = 0.995,
    rate_bounds: tuple[float, float] = (0.1, 2.0),
    unsound: bool = False,
) -> Method:
    """AdamW whose C and learning rate follow a private clip rate; evaluates averaged weights."""
    controller = Paced(clip, clip_rate, gain, bounds, band, up, down, rate_bounds)
    method = replace(
        _counting(controller, Counted(), sigma_b), family="adamw", any_update=False, lr=1e-3
    )
    if unsound:
        method = replace(
            method,
            plan=partial(plans.exact_count, rule=Counted()),
            unsound="the clip rate is read without noise",
        )
    return replace(method, paper_lr=3e-4, weight_average=0.999)


@_entry(
    "quantile",
    "Andrew et al., NeurIPS 2021",
    reads="the released gradient and the noisy count",
    **COUNT,
)
def _quantile(
    clip: float = 0.1,
    target: float = 0.5,
    gain: float = 0.2,
    sigma_b: float | None = None,
    bounds: tuple[float, float] = (1e-3, 1e3),
) -> Method:
    """C follows a quantile of the norms, by a private count."""
    return _counting(Quantile(clip, target, gain, bounds), Counted(), sigma_b)


@_entry(
    "bounded-adaptive",
    "Zhao et al. 2025",
    reads="the released gradient and the noisy count",
    **{**COUNT, "queries": "1 sum, S = 1; 1 count, S = 1/2"},
)
def _bounded_adaptive(
    clip: float = 1.0,
    lower: float = 0.1,
    upper: float = math.inf,
    target: float = 0.5,
    tau: float = 2.5,
    gain: float = 0.2,
    sigma_b: float | None = None,
    normalised: bool = True,
) -> Method:
    """Like quantile, with a floor under C that keeps the minority's gradients."""
    check_inside("tau", tau, 0 < tau < math.inf, "positive")
    controller = Quantile(clip, target, gain, (lower, upper))
    return replace(
        _counting(controller, Counted(tau, normalised), sigma_b),
        paper_lr=1.0 if normalised else 0.25,
    )


@_entry(
    "slaclip",
    "Zou et al., ICML 2026",
    reads="the released gradient and the noisy slots",
    queries="1 sum of d + K coordinates, S = C",
)
def _slaclip(
    clip: float = 1.0,
    slots: int = 10,
    beta: float = 0.5,
    gain: float = 0.2,
    bounds: tuple[float, float] = (0.1, 50.0),
) -> Method:
    """C follows the norms' distribution, written into unused norm at no cost."""
    if isinstance(slots, bool) or slots != int(slots) or slots < 1:
        raise ValueError(f"slots must be a positive whole number, not {slots}")
    return Method(
        rule=Slack(int(slots)),
        controller=SlackControl(clip, beta, gain, bounds),
        fixed={**OWN_SIGNAL, "controller": "the slots that it fills would be read by nobody"},
        paper_lr=0.25,
    )


@_entry("ww-dp-sgd", "WW-DP-SGD (arXiv 2602.10584)", reads="the weights' spectrum")
def _ww_dp_sgd(clip: float = 1.0, paper: bool = False, **spectral: Any) -> Method:
    """C follows the heavy-tail exponent of the weights; costs no privacy."""
    controller = (Spectral.paper if paper else Spectral)(clip, **spectral)
    return Method(
        controller=controller, fixed={"controller": "spectral control is the method"}, paper_lr=0.25
    )


# -- parts that several rows share


def _whitening(rule: Whitened | Important, clip: float, plan: Callable[..., Plan]) -> Method:
    return Method(
        rule=rule,
        controller=Constant(clip),
        plan=partial(plan, rule=rule),
        fixed={
            "rule": "its scaling is the method",
            "controller": "its scales are kept in units of one C",
        },
        paper_lr=0.25,
    )


def _counting(controller: Quantile | Paced, rule: Counted, sigma_b: float | None) -> Method:
    if sigma_b is not None:
        check_inside("sigma_b", sigma_b, 0 < sigma_b < math.inf, "positive")
    plan = partial(plans.beside_count, rule=rule, sigma_b=sigma_b)
    return Method(rule=rule, controller=controller, plan=plan, fixed=OWN_SIGNAL, paper_lr=0.25)


def _decays(*values: float) -> None:
    for value in values:
        check_inside("beta", value, 0 <= value < 1, "at least 0 and below 1")


# -- asking for one


def names(private: bool | None = None) -> list[str]:
    """All names in the order of the table, or the private ones, or the others."""
    return [name for name in TABLE if private is None or (name not in ("sgd", "adam")) == private]


def get(name: str, **options: Any) -> Method:
    """The method of that name with these options.

    An unknown name or option is an error that names similar ones.
    """
    if name not in TABLE:
        raise ValueError(f"there is no method {name!r}; {near(name, TABLE)}")
    entry = TABLE[name]
    own = entry.options()
    made = entry.make(**{key: value for key, value in options.items() if key in own})
    update = {key: value for key, value in options.items() if key not in own}
    known = defaults(made.family)
    for key in update:
        if key not in known:
            raise ValueError(f"method {name!r} has no option {key!r}; {near(key, [*own, *known])}")
    merged = {**made.update, **update}
    described = own | {
        key: (made.update.get(key, value), f"of {made.family}") for key, value in known.items()
    }
    return replace(
        made,
        name=name,
        update=merged,
        summary=entry.summary,
        reads=entry.reads,
        queries=entry.queries,
        noise=entry.noise,
        source=entry.source,
        options=described,
        chosen={key: default for key, (default, _) in described.items()} | options,
    )

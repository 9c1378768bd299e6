"""The spectral controller: ζ of the released weights in, the next clipping norm out.

Every ``period`` updates each probed layer's ζ is smoothed, its distance from the centre of the
healthy zone, in radii, is cut to [-1, 1], and log C moves by that times the gain. A light tail (ζ
above the centre) raises C, a heavy one lowers it.

**Guarantee.** The controller sees readings of weights that the mechanism has already released and
its own state, nothing else: C is post-processing and costs no privacy, as long as the probe reads
only tensors that the private update writes (``Probe.bind`` refuses others). Choosing its settings
by looking at private validation data is not covered.

**Edge cases.** A layer whose fit fails keeps its smoothed ζ; if no layer can be read, C is held. C
stays positive and finite whatever is read, with or without bounds.
"""

from __future__ import annotations

import math
import random
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..spectrum.null import random_null
from ..spectrum.probe import Probe as WeightProbe
from ..spectrum.probe import Reading
from .base import Controller, Probe, check_clip

_STARTS = ("first", "center", "debias")
_LAWS = ("p", "pi", "pid")
_ZONES = ("fixed", "relative")
_SIGNALS = (None, "random", "shuffled")

# Without bounds log C could leave the range of a 32-bit float; e^80 is still inside.
_LOG_LIMIT = 80.0


@dataclass(frozen=True)
class SpectralState:
    """All that the controller remembers; plain values.

    ``log_clip`` is the integrator u of the paper. Without anti-windup it runs on while ``clip``
    stands at a bound. The fields from ``step`` to ``hit`` describe the last probe, those from
    ``probes`` on count.
    """

    clip: float
    log_clip: float
    smoothed: dict[str, float] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    integral: float = 0.0
    error: float | None = None
    step: int = 0
    zeta: float | None = None
    zeta_hat: float | None = None
    phi: float = 0.0
    hit: str = ""
    probes: int = 0
    ok_probes: int = 0
    ok_fits: int = 0
    weak_fits: int = 0
    failed_fits: int = 0


class Spectral(Controller):
    """WW-DP-SGD's controller.

    ``Spectral()`` is the practical form, ``Spectral.paper()`` the literal one.

    Args:
        initial: C until the first probe. Outside ``bounds`` it is used as given until then, with a
            warning.
        probe: layer names or globs, a ``zetaclip.spectrum.Probe`` for more control (``period`` and
            ``fit`` are taken from here), None for the default layers, or any object with ``bind``
            and ``read``.
        period: updates between probes (the paper's K).
        smoothing: β of the moving average, one step per probe.
        center: ζ*, the middle of the healthy zone.
        radius: r, half of its width.
        gain: κ, the largest move of log C per probe.
        bounds: (C_min, C_max), or None for no clamp.
        fit: "rank", "hill" or "ks".
        start: of the average: at the "first" reading, at the "center" (the paper), or "debias" (at
            zero, with the missing weight divided out).
        anti_windup: keep u inside the bounds too, and stop the integral of "pi" and "pid" while it
            would only push further into a bound or the saturation. The paper clamps C alone.
        zone: "fixed", or "relative": each layer's centre is ``radius`` below the median that random
            matrices of its shape read, and ``center`` is not used.
        sign: -1 turns the feedback round, as a control experiment.
        law: "p"; "pi" adds the sum of past errors, "pid" also the change of the smoothed error,
            both inside the saturation, so that one probe never moves log C by more than the gain.
        gain_by_error: divide the gain by 1 + (stderr / radius)², so that uncertain fits move C
            less.
        signal: None; "random" feeds a uniform draw from the zone, "shuffled" the reading of the
            same weights in random order. Controllers fed a wrong ζ, to compare with.
        integral_gain: weight of the sum in "pi" and "pid".
        derivative_gain: weight of the change in "pid".
        signal_seed: of "random".
    """

    def __init__(
        self,
        initial: float = 1.0,
        probe: str | Sequence[str] | Probe | None = None,
        period: int = 50,
        smoothing: float = 0.9,
        center: float = 4.0,
        radius: float = 2.0,
        gain: float = 0.1,
        bounds: tuple[float, float] | None = (0.5, 3.0),
        fit: str = "rank",
        start: str = "first",
        anti_windup: bool = True,
        zone: str = "fixed",
        sign: int = +1,
        law: str = "p",
        *,
        gain_by_error: bool = False,
        signal: str | None = None,
        integral_gain: float = 0.1,
        derivative_gain: float = 0.5,
        signal_seed: int = 0,
    ) -> None:
        self.initial = check_clip(initial)
        _choice("start", start, _STARTS)
        _choice("zone", zone, _ZONES)
        _choice("law", law, _LAWS)
        _choice("signal", signal, _SIGNALS)
        _choice("sign", sign, (1, -1))
        _inside("smoothing", smoothing, 0.0 <= smoothing < 1.0, "at least 0 and below 1")
        _inside("center", center, math.isfinite(center), "finite")
        _inside("radius", radius, 0.0 < radius < math.inf, "positive")
        _inside("gain", gain, 0.0 <= gain < math.inf, "at least 0")
        _inside("integral_gain", integral_gain, 0.0 <= integral_gain < math.inf, "at least 0")
        _inside("derivative_gain", derivative_gain, 0.0 <= derivative_gain < math.inf, "at least 0")
        if bounds is not None:
            low, high = (check_clip(bound) for bound in bounds)
            if low > high:
                raise ValueError(f"bounds must be (C_min, C_max), not {bounds}")
            bounds = (low, high)
            if not low <= self.initial <= high:
                warnings.warn(
                    f"the initial clipping norm {self.initial:g} is outside the bounds {low:g} to "
                    f"{high:g}: it is used until the first probe and clamped there",
                    stacklevel=2,
                )
        self.period, self.smoothing, self.center, self.radius = period, smoothing, center, radius
        self.gain, self.bounds, self.fit, self.start = gain, bounds, fit, start
        self.anti_windup, self.zone, self.sign, self.law = anti_windup, zone, sign, law
        self.gain_by_error, self.signal, self.signal_seed = gain_by_error, signal, signal_seed
        self.integral_gain, self.derivative_gain = integral_gain, derivative_gain
        layers = (
            WeightProbe(probe) if probe is None or isinstance(probe, (str, list, tuple)) else probe
        )
        if isinstance(layers, WeightProbe):
            layers = layers.configured(fit=fit, period=period, shuffle=signal == "shuffled")
        elif not isinstance(layers, Probe):
            raise TypeError(
                f"probe must be a name, a list of names or a Probe, not {type(layers).__name__}"
            )
        self.probe: Probe | None = layers

    @classmethod
    def paper(cls, initial: float = 1.0, **options: Any) -> Spectral:
        """Algorithm 1 to the letter.

        The slow average starts at the centre, and u is never clamped.
        """
        literal: dict[str, Any] = {"smoothing": 0.98, "start": "center", "anti_windup": False}
        return cls(initial, **{**literal, **options})

    def init(self) -> SpectralState:
        """The initial C, before any probe."""
        return SpectralState(clip=self.initial, log_clip=math.log(self.initial))

    def update(self, reading: Reading, state: SpectralState) -> SpectralState:
        """One probe: a pure function of the reading and the state."""
        zetas = self._signal(reading)
        state = self._smooth(reading, zetas, state)
        if not zetas:
            # Nothing was learned, so nothing moves; only an initial C outside the bounds is brought
            # inside.
            return self._move(replace(state, zeta=None), 0.0, 0.0)
        centers = {layer: self.center_for(reading, layer) for layer in state.smoothed}
        errors = [zeta - centers[layer] for layer, zeta in state.smoothed.items()]
        error = self._aggregate(errors) / self.radius
        state = replace(
            state,
            zeta=self._aggregate(list(zetas.values())),
            zeta_hat=self._aggregate(list(state.smoothed.values())),
        )
        gain = self.gain
        if self.gain_by_error:
            gain /= (
                1.0
                + (self._aggregate([reading.fits[layer].stderr for layer in zetas]) / self.radius)
                ** 2
            )
        return self._steer(state, error, gain)

    def entry(self, state: SpectralState) -> tuple[Any, ...] | None:
        """(step, ζ, ζ̂, φ, C, clamp hit) of the last probe.

        ζ is None where no fit worked; the hit is "min", "max" or "".
        """
        if state.probes == 0:
            return None
        return (state.step, state.zeta, state.zeta_hat, state.phi, state.clip, state.hit)

    def finish(self, state: SpectralState) -> dict[str, int]:
        """Counts for the result of a run.

        Warns if there were probes and none of them could be used.
        """
        if state.probes and not state.ok_probes:
            warnings.warn(
                f"none of the {state.probes} spectral probes gave a usable fit, so the clipping "
                "norm never moved; probe another layer",
                stacklevel=2,
            )
        names = ("probes", "ok_probes", "ok_fits", "weak_fits", "failed_fits")
        return {name: int(getattr(state, name)) for name in names}

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name not in ("period", "fit")}
        return f"Spectral({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def _signal(self, reading: Reading) -> dict[str, float]:
        """The ζ of every layer that can be used at this probe."""
        if self.signal == "random":
            # Keyed by seed, step and layer, so that the draw is no state and a replay repeats it.
            return {
                layer: self.center_for(reading, layer)
                + self.radius
                * random.Random(f"{self.signal_seed}/{reading.step}/{layer}").uniform(-1.0, 1.0)
                for layer in reading.fits
            }
        return {
            layer: fit.zeta
            for layer, fit in reading.fits.items()
            if fit.ok and math.isfinite(fit.zeta)
        }

    def _smooth(
        self, reading: Reading, zetas: dict[str, float], state: SpectralState
    ) -> SpectralState:
        smoothed, seen = dict(state.smoothed), dict(state.seen)
        if self.start == "center":
            for layer in reading.fits:
                smoothed.setdefault(layer, self.center_for(reading, layer))
        for layer, zeta in zetas.items():
            count = seen.get(layer, 0)
            seen[layer] = count + 1
            if layer not in smoothed:
                smoothed[layer] = zeta
            elif self.start == "debias":
                # The average that started at zero is the debiased one times the weight it has
                # gathered.
                raw = smoothed[layer] * (1.0 - self.smoothing**count)
                raw = self.smoothing * raw + (1.0 - self.smoothing) * zeta
                smoothed[layer] = raw / (1.0 - self.smoothing ** (count + 1))
            else:
                smoothed[layer] = self.smoothing * smoothed[layer] + (1.0 - self.smoothing) * zeta
        fits = reading.fits.values()
        return replace(
            state,
            smoothed=smoothed,
            seen=seen,
            step=reading.step,
            probes=state.probes + 1,
            ok_probes=state.ok_probes + any(fit.ok for fit in fits),
            ok_fits=state.ok_fits + sum(fit.ok for fit in fits),
            weak_fits=state.weak_fits + sum(fit.weak for fit in fits),
            failed_fits=state.failed_fits + sum(not fit.ok for fit in fits),
        )

    def center_for(self, reading: Reading, layer: str) -> float:
        """The centre of a layer's zone."""
        if self.zone == "fixed":
            return self.center
        k = self.probe.k if isinstance(self.probe, WeightProbe) else None
        return random_null(reading.shapes[layer], self.fit, k).median - self.radius

    def _aggregate(self, values: Sequence[float]) -> float:
        if isinstance(self.probe, WeightProbe) and self.probe.aggregate == "mean":
            return statistics.fmean(values)
        return float(statistics.median(values))

    def _steer(self, state: SpectralState, error: float, gain: float) -> SpectralState:
        """The control law: a relative error in, a move of log C out."""
        drive = error
        integral = state.integral
        if self.law in ("pi", "pid"):
            integral += _saturate(error)
            drive += self.integral_gain * integral
        if self.law == "pid" and state.error is not None:
            drive += self.derivative_gain * (error - state.error)
        phi = _saturate(drive)
        moved = self._move(state, phi, gain)
        if self.anti_windup and integral * error > 0.0:
            # Growing further would only have to be undone once the error changes sign.
            outward = self.sign * error
            stuck = (moved.hit == "max" and outward > 0.0) or (moved.hit == "min" and outward < 0.0)
            if stuck or abs(drive) > 1.0:
                integral = state.integral
        return replace(moved, integral=integral, error=error)

    def _move(self, state: SpectralState, phi: float, gain: float) -> SpectralState:
        step = self.sign * gain * phi
        log_clip = min(max(state.log_clip + step, -_LOG_LIMIT), _LOG_LIMIT)
        # exp(log C) is not C to the last bit, and a controller that does not move must not change
        # anything.
        clip = math.exp(log_clip) if step else state.clip
        hit = ""
        if self.bounds is not None:
            low, high = self.bounds
            hit = "min" if clip < low else "max" if clip > high else ""
            clip = min(max(clip, low), high)
            if self.anti_windup:
                log_clip = min(max(log_clip, math.log(low)), math.log(high))
        return replace(state, clip=clip, log_clip=log_clip, phi=phi, hit=hit)


def _saturate(value: float) -> float:
    return max(-1.0, min(1.0, value))


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _inside(name: str, value: float, holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {what}, not {value!r}")

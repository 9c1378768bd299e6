"""Names of methods, their options, models and settings, for checks that don't wait for torch.

The code that has these names imports torch, which takes a second. So they are listed here once
more; ``tests/test_interfaces.py`` compares the lists.
"""

from __future__ import annotations

_SGD = ("momentum", "dampening", "nesterov", "weight_decay")
_ADAM = ("betas", "eps", "weight_decay", "amsgrad")
_CONTROLLER = (
    "probe", "period", "smoothing", "center", "radius", "gain", "bounds", "fit", "start",
    "anti_windup", "zone", "sign", "law", "gain_by_error", "signal", "integral_gain",
    "derivative_gain", "signal_seed",
)  # fmt: skip
# The options of each method, those of its optimizer included.
METHODS: dict[str, tuple[str, ...]] = {
    "sgd": _SGD,
    "adam": _ADAM,
    "auto": ("clip", "momentum", "weight_decay", "gain", "steps", "regression", "decay"),
    "dp-sgd": ("clip", *_SGD),
    "dp-adam": ("clip", *_ADAM),
    "dp-adam-bc": ("clip", "betas", "floor", "weight_decay"),
    "dp-adamw": ("clip", *_ADAM),
    "adp-adamw": ("clip", "ratio", "sigma_min", *_ADAM),
    "dp-is": ("clip", "cap", "unsound", *_SGD),
    "dp-sam": ("clip", "rho", "ascent_batch", "ascent_share", *_SGD),
    "dp-sat": ("clip", "rho", *_SGD),
    "auto-s": ("clip", "gamma", *_SGD),
    "dp-psac": ("clip", "r", *_SGD),
    "adaclip": ("clip", "beta1", "beta2", "cap_spread", "adapt", *_SGD),
    "adadpigu": ("clip", "keep", "warmup", "beta1", "beta2", "cap_spread", "whiten", *_SGD),
    "dp-adam-ac": (
        "clip", "clip_rate", "gain", "sigma_b", "bounds", "band", "up", "down", "rate_bounds",
        "unsound", *_ADAM,
    ),
    "quantile": ("clip", "target", "gain", "sigma_b", "bounds", *_SGD),
    "bounded-adaptive": (
        "clip", "lower", "upper", "target", "tau", "gain", "sigma_b", "normalised", *_SGD,
    ),
    "slaclip": ("clip", "slots", "beta", "gain", "bounds", *_SGD),
    "ww-dp-sgd": ("clip", "paper", *_CONTROLLER, *_SGD),
}  # fmt: skip
# The arguments of ``zetaclip.Spectral``, and what ``clipping.build_spectral`` adds.
SPECTRAL = ("initial", *_CONTROLLER, "paper", "aggregate")
MODELS = (
    "cnn", "cnn-large", "resnet-small", "resnet18", "resnet34", "linear", "head",
    "mlp", "mlp-2", "mlp-3", "mlp-4", "mlp-5",
)  # fmt: skip
# The options of features; with "auto", the data decide which of them are used.
FEATURES: dict[str, tuple[str, ...]] = {
    "patches": ("mirror",),
    "scattering": ("length",),
    "bins": ("knots", "crosses", "share"),
}

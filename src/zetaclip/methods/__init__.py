"""Every named method, and the parts that a method of your own is put together from.

    method = zetaclip.methods.get("dp-sam", rho=0.05)

``names()`` lists them; ``Method`` composes a clip rule, a controller, passes and an update.
"""

from ._auto import Auto
from ._composition import Method
from ._noise_plan import NoiseBudget, NoiseSchedule, Pass, Plan, at, same_for_all
from ._table import get, names
from ._updates import AdamBC, WeightAverage

__all__ = [
    "AdamBC",
    "Auto",
    "Method",
    "NoiseBudget",
    "NoiseSchedule",
    "Pass",
    "Plan",
    "WeightAverage",
    "at",
    "get",
    "names",
    "same_for_all",
]

"""Fixed features for pictures: nothing in them was learned from real records.

    module = patches((3, 32, 32))          # frozen; made once from synthetic pictures, then cached
    features = precompute(dataset, module)  # the data set with features in place of pictures

A head that is trained privately on such features needs far less privacy than a whole network.
"""

from __future__ import annotations

from ._precompute import features_of, precompute
from .patches import Patches, patches
from .scattering import Scattering, scattering

__all__ = ["Patches", "Scattering", "features_of", "patches", "precompute", "scattering"]

import pytest

from zetaclip.features._blocks import Block, Second
from zetaclip.features._patches import Settings, from_settings


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """No test reads or writes the cache of whoever runs it."""
    monkeypatch.setenv("ZETACLIP_CACHE", str(tmp_path / "cache"))


def tiny(channels=3, height=12, width=12, mirror=True, pictures=None, seed=0, framed=0):
    """Small settings that have every part: two sizes, and a second layer."""
    size, half = (height, width), ((height + 1) // 2, (width + 1) // 2)
    blocks = (
        Block(size, 0, 4, 2, 8, 2, 6, 3, mirror),
        Block(half, 1, 3, 1, 8, 2, 6, 3, mirror),
        Block(size, 1, 3, 1, 8, 2, 6, 3, mirror, Second(1, 6, 8)),
        Block(size, 1, 3, 1, 8, 1, 6, 3, mirror, Second(2, 6, 8)),
    )
    kinds = (("leaves", 40), ("dense", 40)) if channels == 3 else (("strokes", 60), ("shapes", 20))
    return Settings((channels, height, width), blocks, pictures or kinds, seed, framed)


@pytest.fixture
def settings():
    return tiny


@pytest.fixture
def small():
    """Makes a small module."""
    return lambda **changes: from_settings(tiny(**changes))

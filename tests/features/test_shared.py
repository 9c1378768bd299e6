"""Features that runs of one session share: computed once, private, and gone at the end."""

import os
import subprocess
import sys

import pytest
import torch

from zetaclip.data import load
from zetaclip.features import _precompute, precompute, scattering, shared
from zetaclip.features._blocks import Block
from zetaclip.features._patches import Settings, from_settings


@pytest.fixture
def digits():
    return load("digits")


@pytest.fixture
def computed(monkeypatch):
    """The numbers of records whose features were computed."""
    seen = []
    made = _precompute.features_of

    def counted(module, x, moved):
        seen.append(len(x))
        return made(module, x, moved)

    monkeypatch.setattr(_precompute, "features_of", counted)
    return seen


def test_a_second_run_on_the_same_records_finds_them(tmp_path, digits, computed):
    module = scattering((1, 8, 8))
    alone = precompute(digits, module)
    computed.clear()
    with shared(tmp_path / "private"):
        first, second = precompute(digits, module), precompute(digits, module)
    assert computed == [len(digits.train), len(digits.test)]
    for split in ("train", "test"):
        assert torch.equal(getattr(first, split).x, getattr(alone, split).x)
        assert torch.equal(getattr(second, split).x, getattr(alone, split).x)


def test_other_records_or_other_features_are_computed(tmp_path, digits, computed):
    module = scattering((1, 8, 8))
    with shared(tmp_path / "private"):
        precompute(digits, module)
        digits.train.x[5, 0, 3, 3] += 0.25
        precompute(digits, module)
        assert computed == [len(digits.train), len(digits.test), len(digits.train)]
        block = Block((8, 8), 1, 4, 1, 8, 2, 6, 3, False)
        precompute(digits, from_settings(Settings((1, 8, 8), (block,), (("strokes", 40),))))
    assert len(computed) == 5


def test_writing_into_features_does_not_reach_other_runs(tmp_path, digits):
    module = scattering((1, 8, 8))
    with shared(tmp_path / "private"):
        before = precompute(digits, module).train.x.clone()
        precompute(digits, module).train.x.zero_()
        assert torch.equal(precompute(digits, module).train.x, before)


def test_the_folder_is_for_its_owner_alone_and_goes_at_the_end(tmp_path, digits):
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "left by a killed process").touch()
    with shared(folder):
        assert not list(folder.iterdir())
        precompute(digits, scattering((1, 8, 8)))
        assert folder.stat().st_mode & 0o077 == 0
        files = [path for path in folder.iterdir() if path.suffix == ".npy"]
        assert len(files) == 2 and not any(path.stat().st_mode & 0o077 for path in files)
    assert not folder.exists() and "ZETACLIP_SHARED_FEATURES" not in os.environ


def test_processes_that_are_started_inside_share_them(tmp_path, digits, computed):
    script = (
        "from zetaclip.data import load; from zetaclip.features import precompute, scattering;"
        "precompute(load('digits'), scattering((1, 8, 8)))"
    )
    with shared(tmp_path / "private"):
        subprocess.run([sys.executable, "-c", script], check=True)
        precompute(digits, scattering((1, 8, 8)))
    assert computed == []


def test_without_a_folder_features_are_computed(tmp_path, digits, computed, monkeypatch):
    monkeypatch.setenv("ZETACLIP_SHARED_FEATURES", str(tmp_path / "gone"))
    found = precompute(digits, scattering((1, 8, 8)))
    assert len(computed) == 2 and not (tmp_path / "gone").exists()
    assert torch.isfinite(found.train.x).all()

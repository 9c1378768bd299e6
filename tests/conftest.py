import os

# Before torch is imported anywhere: two tests side by side must not fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.set_num_threads(1)
    torch.manual_seed(1234)


@pytest.fixture
def own_rules():
    """Layer rules that a test registers are gone after it."""
    from zetaclip.gradients import LAYER_RULES

    known = dict(LAYER_RULES)
    yield
    LAYER_RULES.clear()
    LAYER_RULES.update(known)

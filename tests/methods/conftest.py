import pytest

from zetaclip.methods import _plans as plans

_SOLVED = {}


@pytest.fixture(autouse=True)
def _solved_once(monkeypatch):
    """The accountant takes longer than everything else here; the same plan is worked out once for
    all tests."""
    solve = plans._solved

    def cached(budget, make_events):
        key = (budget, tuple(make_events(1.0)))
        if key not in _SOLVED:
            _SOLVED[key] = solve(budget, make_events)
        return _SOLVED[key]

    monkeypatch.setattr(plans, "_solved", cached)

"""ε in a progress bar: told ahead, so that it is never below what has been spent."""

import pytest
from helpers import mean_loss, private, tiny, toy_data

from zetaclip.accounting import epsilon
from zetaclip.integrations.terms import EpsilonEstimate
from zetaclip.ledger import Event

DELTA = 1e-5


def told(cost, epochs=None, limit=None, steps=20):
    """(updates, told, exact) after each of them, with an accountant that seems to take ``cost``
    seconds."""
    options = {} if epochs is None else {"epochs": epochs}
    engine, module, optimizer, loader = private(tiny(), toy_data(), q=0.25, **options)
    estimate, lines = EpsilonEstimate(engine, DELTA, limit), []
    while engine.updates < steps:
        for batch in loader:
            optimizer.zero_grad()
            mean_loss(module, batch).backward()
            optimizer.step()
            if estimate._cost is not None:
                estimate._cost = cost
            exact = epsilon([Event(0.25, 1.0, engine.updates)], DELTA, "rdp")
            lines.append((engine.updates, estimate.epsilon(), exact))
    assert estimate.epsilon(exact=True) == pytest.approx(lines[-1][2], rel=1e-9)
    return lines


@pytest.mark.parametrize("cost", [0.0, 1e-4, 1e-3, 10.0])
@pytest.mark.parametrize("epochs", [None, 5])
def test_it_is_never_below_what_was_spent(cost, epochs):
    lines = told(cost, epochs)
    assert all(shown >= spent * (1 - 1e-9) for _, shown, spent in lines)
    if cost == 0.0:
        assert all(shown == pytest.approx(spent, rel=1e-9) for _, shown, spent in lines)


def test_it_looks_no_further_than_training_goes():
    whole = epsilon([Event(0.25, 1.0, 20)], DELTA, "rdp")
    assert all(shown == pytest.approx(whole, rel=1e-9) for _, shown, _ in told(10.0, epochs=5)[2:])
    least = epsilon([Event(0.25, 1.0, 12)], DELTA, "rdp")
    assert told(10.0, epochs=5, limit=12)[8][1] == pytest.approx(least, rel=1e-9)

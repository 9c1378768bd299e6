"""A budget's filter against independent accountants, and one budget however it is copied."""

import copy
import json
import math
import multiprocessing
import pickle

import pytest
from sklearn.base import clone

from zetaclip import Budget, BudgetExceeded
from zetaclip.accounting import epsilon, noise_multiplier_for
from zetaclip.accounting._accounting import renyi
from zetaclip.errors import LedgerError
from zetaclip.ledger import Event

FIT = [Event(0.01, 4.0, 500)]


@pytest.mark.filterwarnings("ignore:Optimal order is the")  # there is only one
@pytest.mark.parametrize(("eps", "delta"), [(0.1, 1e-6), (1.0, 1e-5), (3.0, 1e-5), (12.0, 1e-9)])
def test_each_order_allows_what_its_share_of_delta_does(eps, delta):
    from opacus.accountants.analysis.rdp import get_privacy_spent

    orders = Budget(eps, delta).orders
    assert len(orders) >= 3 and sorted(orders) == list(orders)
    used = 0.0
    for order, allowed in orders.items():
        # δ at which this divergence is just (eps, δ)-DP, from the textbook's conversion solved the
        # other way.
        share = math.exp((order - 1) * (allowed - eps + math.log1p(-1 / order)) - math.log(order))
        used += share
        found, _ = get_privacy_spent(orders=[order], rdp=[allowed], delta=share)
        assert found == pytest.approx(eps, rel=1e-9)
    # A filter whose best order depends on what came out needs all shares together to stay within δ.
    assert used <= delta * (1 + 1e-9)


def test_divergences_are_those_of_another_library():
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    orders = [2.0, 8.0, 32.0, 64.0]
    events = [Event(0.02, 1.3, 700), Event(0.5, 9.0, 40)]
    accountant = RdpAccountant(orders)
    for event in events:
        step = dp_accounting.PoissonSampledDpEvent(
            event.sample_rate, dp_accounting.GaussianDpEvent(event.noise_multiplier)
        )
        accountant.compose(step, event.count)
    assert renyi(events, orders) == pytest.approx(list(accountant._rdp), rel=1e-6)
    assert renyi([], orders) == [0.0] * 4 and renyi([Event(0.1, 0.0, 1)], orders) == [math.inf] * 4


def test_fits_are_granted_until_the_budget_is_reached():
    budget = Budget(3.0, 1e-5)
    while budget.allows(FIT):
        budget.spend(FIT)
    granted = len(budget.spendings)
    with pytest.raises(
        BudgetExceeded, match=r"budget is ε = 3 at δ = 1e-05, of which .* is spent in \d+ fits"
    ):
        budget.spend(FIT)
    together = [Event(0.01, 4.0, 500 * granted)]
    # Never more than the truth allows, nearly all of it, and much more than adding up ε would.
    truth = epsilon(together, 1e-5, "pld")
    assert 0.75 * 3.0 < truth <= budget.spent <= 3.0
    assert granted > 2 * 3.0 / epsilon(FIT, 1e-5 / granted, "pld")
    assert len(budget.spendings) == granted


def test_one_fit_may_take_everything_and_is_then_the_last():
    sigma = noise_multiplier_for(1.0, 1e-5, 0.02, 400, "pld")
    budget = Budget(1.0, 1e-5)
    budget.spend([Event(0.02, sigma, 400)])
    assert budget.spent == pytest.approx(1.0, rel=5e-3)
    with pytest.raises(BudgetExceeded):
        budget.spend([Event(0.02, 50.0, 1)])
    with pytest.raises(BudgetExceeded, match="0 fits"):
        Budget(1.0, 1e-5).spend([Event(0.02, sigma * 0.99, 400)])


def test_without_noise_nothing_is_granted():
    with pytest.raises(BudgetExceeded):
        Budget(1e6, 0.5).spend([Event(0.01, 0.0, 1)])


def test_copies_and_clones_are_the_same_object():
    from zetaclip.integrations.sklearn import PrivateClassifier

    budget = Budget(1.0, 1e-5)
    assert copy.deepcopy(budget) is budget and copy.copy(budget) is budget
    assert clone(PrivateClassifier(budget=budget)).budget is budget
    other = pickle.loads(pickle.dumps(budget))
    other.spend(FIT, "elsewhere")
    assert [s.what for s in budget.spendings] == ["elsewhere"] and budget.spent == other.spent > 0


def _spend_all(pickled, answers):
    budget = pickle.loads(pickled)
    count = 0
    try:
        while True:
            budget.spend(FIT)
            count += 1
    except BudgetExceeded:
        answers.put(count)


def test_processes_that_spend_at_the_same_time_get_no_more_than_one():
    alone = Budget(2.0, 1e-5)
    while alone.allows(FIT):
        alone.spend(FIT)
    shared = Budget(2.0, 1e-5)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    workers = [
        context.Process(target=_spend_all, args=(pickle.dumps(shared), answers)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    granted = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(granted) == len(shared.spendings) == len(alone.spendings) > 4
    assert shared.path.exists()  # the workers' ends did not take it along


def test_refunds(tmp_path):
    budget = Budget(1.0, 1e-5, tmp_path / "b")
    receipt = budget.spend(FIT)
    budget.refund(receipt)
    assert budget.spent == 0.0 and budget.spendings == []


def test_the_file_outlives_the_object_and_is_checked(tmp_path):
    path = tmp_path / "study.budget"
    Budget(1.0, 1e-5, path).spend(FIT, "first")
    again = Budget(1.0, 1e-5, path)
    assert [s.what for s in again.spendings] == ["first"] and again.spendings[0].events == tuple(
        FIT
    )
    with pytest.raises(ValueError, match="is a budget of ε = 1 at δ = 1e-05, not of ε = 2"):
        Budget(2.0, 1e-5, path)
    with path.open("a") as file:
        file.write('{"spend": "cut o')  # a killed writer; its fit never began
    again.spend(FIT, "second")
    assert [s.what for s in again.spendings] == ["first", "second"]
    assert all(json.loads(line) for line in path.read_text().splitlines())
    path.write_text("nonsense\n")
    with pytest.raises(LedgerError, match="not the file of a budget"):
        again.spend(FIT)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="is gone"):
        again.spend(FIT)


@pytest.mark.parametrize("content", ['{"results": [1, 2, 3]}', "notes", "two\nlines", "\x00\xff"])
def test_a_file_of_somebody_else_is_left_alone(tmp_path, content):
    path = tmp_path / "study.json"
    path.write_text(content)
    with pytest.raises(LedgerError, match="not the file of a budget"):
        Budget(1.0, 1e-5, path)
    assert path.read_text() == content


def test_a_header_that_was_cut_is_written_anew(tmp_path):
    whole = tmp_path / "whole.budget"
    Budget(1.0, 1e-5, whole)
    cut = tmp_path / "cut.budget"
    for length in (0, 1, 12, len(whole.read_text()) - 1):
        cut.write_text(whole.read_text()[:length])
        Budget(1.0, 1e-5, cut)
        assert cut.read_text() == whole.read_text()


def test_a_budget_without_a_path_leaves_no_file():
    budget = Budget(1.0, 1e-5)
    path = budget.path
    assert path.exists()
    del budget
    assert not path.exists()


@pytest.mark.parametrize(
    ("eps", "delta"), [(0, 1e-5), (math.inf, 1e-5), (1, 0), (1, 1), (math.nan, 1e-5)]
)
def test_budgets_that_are_none(eps, delta):
    with pytest.raises(ValueError, match="a budget's"):
        Budget(eps, delta)


def test_a_line_that_was_cut_off_gives_no_number_twice(tmp_path):
    budget = Budget(3.0, 1e-5, path=tmp_path / "budget")
    first = budget.spend([Event(0.01, 20.0, 1)])
    with open(budget.path, "ab") as file:
        file.write(b'{"spend": "1-')  # a full disk
    later = [budget.spend([Event(0.01, 20.0, 1)]) for _ in range(2)]
    assert [Budget.number_of(receipt) for receipt in (first, *later)] == [0, 1, 2]


def test_no_two_receipts_have_the_same_number():
    budget = Budget(3.0, 1e-5)
    first, second = budget.spend(FIT, 'a {"spend": name'), budget.spend(FIT)
    budget.refund(first)
    third = budget.spend(FIT)
    assert [budget.number_of(receipt) for receipt in (first, second, third)] == [0, 1, 2]
    assert len(budget.spendings) == 2

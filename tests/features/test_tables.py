"""Bins of tables, compared with scikit-learn, and at the edges of what is declared."""

import numpy as np
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, SplineTransformer

from zetaclip.data.columns import Categorical, Numeric, encode
from zetaclip.errors import InputError
from zetaclip.features import Bins, bins, features_of, rebuilt

COLUMNS = (
    Numeric("age", 0, 100, flag_missing=True),
    Categorical("ward", ("A", "B", "C")),
    Numeric("dose", 1, 1000, log=True),
)
TABLE = {
    "age": ["50", "", "-5", "130"],
    "ward": ["B", "A", "?", "Z"],
    "dose": ["1", "31", "1000", "NA"],
}


def numbers(count, width=3):
    return torch.rand((count, width), generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("count", [2, 3, 8])
def test_weights_of_knots_are_linear_splines(count):
    x = numbers(50, 1)
    knots = np.linspace(-1, 1, count)[:, None]
    theirs = SplineTransformer(degree=1, knots=knots, extrapolation="constant").fit_transform(x)
    ours = Bins([("number", 1)], knots=(count,))(x).double().numpy()
    theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_linear_head_is_any_piecewise_linear_function():
    x, values = numbers(40, 1), np.array([3.0, -1.0, 2.0, 0.5, 7.0])
    hats = Bins([("number", 1), ("category", 1)], knots=(5,))(torch.cat([x, torch.ones(40, 1)], 1))
    shape = (
        (hats / hats[:, -1:])[:, :5].double().numpy()
    )  # the category has weight 1 before scaling
    wanted = np.interp(x[:, 0].numpy(), np.linspace(-1, 1, 5), values)
    np.testing.assert_allclose(shape @ values, wanted, atol=1e-5)


def test_categories_are_one_hot_and_unknown_ones_zero():
    words = np.array([["B"], ["A"], ["Z"]])
    theirs = OneHotEncoder(categories=[["A", "B", "C"]], handle_unknown="ignore").fit_transform(
        words
    )
    encoded = torch.from_numpy(encode([COLUMNS[1]], {"ward": words[:, 0].tolist()}))
    np.testing.assert_allclose(Bins([("category", 3)])(encoded), theirs.toarray())


def test_missing_numbers_and_numbers_outside_of_their_bounds():
    found = bins(COLUMNS, options={"knots": 3})(torch.from_numpy(encode(COLUMNS, TABLE)))
    age, flag, ward, dose = found.split((3, 1, 3, 3), 1)
    assert (flag[:, 0] > 0).tolist() == [False, True, False, False]
    assert age[1].abs().sum() == 0  # a missing age is in no bin
    assert age[2].argmax() == 0 and age[3].argmax() == 2  # -5 counts as 0, 130 as 100
    assert (age[2] > 0).sum() == 1 and (age[3] > 0).sum() == 1
    assert ward[2:].abs().sum() == 0
    assert dose[3].argmax() == 1 and (dose[3] > 0).sum() == 1  # no flag: the middle
    torch.testing.assert_close(found.norm(dim=1), torch.ones(4))


def test_crosses_are_the_products_of_the_weights_of_two_numbers():
    x = torch.cat([numbers(20), torch.ones(20, 1)], 1)
    layout = [("number", 1)] * 3 + [("category", 1)]
    module = Bins(layout, knots=(4,), crosses=3, share=0.7)
    found = module(x)
    single = SplineTransformer(degree=1, knots=np.linspace(-1, 1, 3)[:, None].repeat(3, 1))
    hats = single.fit_transform(x[:, :3]).reshape(20, 3, 3)
    pairs = [np.einsum("ni,nj->nij", hats[:, a], hats[:, b]) for a, b in ((0, 1), (0, 2), (1, 2))]
    wanted = np.stack(pairs, 1).reshape(20, -1)
    wanted *= np.sqrt(0.7) / np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(found[:, -27:], wanted, atol=1e-6)
    own = Bins(layout, knots=(4,))(x)
    torch.testing.assert_close(found[:, :-27], own * 0.3**0.5)
    assert found.shape[1] == module.columns


def test_a_missing_number_has_no_crosses():
    x = torch.tensor([[0.3, 0.0, 0.4], [0.3, 1.0, 0.4]])
    found = Bins([("number", 2), ("number", 1)], crosses=2, knots=(3,))(x)
    assert found[0, -4:].abs().sum() > 0 and found[1, -4:].abs().sum() == 0


def test_a_row_depends_on_no_other_row_and_nothing_is_fitted():
    x = torch.from_numpy(encode(COLUMNS, TABLE))
    module = bins(COLUMNS, regression=True)
    whole = module(x)
    for row in range(len(x)):
        assert torch.equal(module(x[row : row + 1])[0], whole[row])
    assert torch.equal(features_of(module, x.repeat(800, 1))[:4], whole)
    assert not list(module.parameters()) and not module.state_dict()


def test_a_description_makes_the_same_features_again():
    import json

    x = torch.from_numpy(encode(COLUMNS, TABLE))
    module = bins(COLUMNS, regression=True, options={"share": 0.6})
    twin = rebuilt(json.loads(json.dumps(module.describe())))
    assert torch.equal(twin(x), module(x)) and twin.columns == module(x).shape[1]
    with pytest.raises(InputError, match="another version"):
        rebuilt({**module.describe(), "columns": 1})


def test_many_numbers_get_no_crosses():
    columns = [Numeric(str(i), 0, 1) for i in range(30)]
    assert bins(columns, regression=True).crosses == 0
    assert bins(columns[:5], regression=True).crosses > 0
    assert bins(columns[:5]).crosses == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bins": 4}, "has no option bins; it has knots"),
        ({"knots": 1}, "at least 2"),
        ({"crosses": 1}, "crosses must be 0 or"),
        ({"share": 1.5}, "share between 0 and 1"),
        ({"knots": "x"}, "can't be used"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        bins(COLUMNS, options=options)


def test_wrong_layouts_are_named():
    with pytest.raises(InputError, match="crosses need at least two numbers"):
        Bins([("number", 1)], crosses=2)
    with pytest.raises(InputError, match="kind number, category, block"):
        Bins([("word", 1)])

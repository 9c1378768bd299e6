"""``PrivateClassifier`` on arrays of pictures."""

import pickle

import numpy as np
import pytest
from sklearn.datasets import load_digits

from zetaclip.errors import PrivacyLeakWarning
from zetaclip.sklearn import PrivateClassifier

DIGITS = load_digits()
TRAIN, TEST = slice(0, 1437), slice(1437, None)


def classifier(**changes):
    given = {
        "epsilon": 3,
        "features": "patches",
        "method": "auto-s",
        "epochs": 20,
        "bounds": (0, 16),
        "classes": range(10),
        "num_examples": 1437,
        "random_state": 0,
    }
    return PrivateClassifier(**{**given, **changes})


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZETACLIP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield classifier().fit(DIGITS.images[TRAIN], DIGITS.target[TRAIN])


def test_a_head_on_fixed_features_learns_digits(fitted):
    """0.93 in the measurement; the network without features reaches 0.8."""
    assert fitted.score(DIGITS.images[TEST], DIGITS.target[TEST]) > 0.9
    assert fitted.epsilon_ <= 3.0001
    assert [name for name, _ in fitted.module_.named_parameters()] == ["fc.weight"]


def test_layouts_and_types_of_the_same_pictures_give_the_same_answers(fitted):
    x = DIGITS.images[TEST][:40]
    wanted = fitted.predict_proba(x)
    for same in (x.astype(np.float32), x.astype(np.uint8)):
        np.testing.assert_allclose(fitted.predict_proba(same), wanted, rtol=1e-5)
    copy = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copy.predict_proba(x), wanted)


def test_other_shapes_are_refused(fitted):
    with pytest.raises(ValueError, match="fitted on"):
        fitted.predict(np.zeros((2, 8, 9)))
    with pytest.raises(ValueError, match="X holds pictures"):
        classifier().fit(np.zeros((4, 64)), [0, 1, 0, 1])
    with pytest.raises(ValueError, match="two numbers"):
        classifier(bounds=0).fit(DIGITS.images[:4], [0, 1, 0, 1])


def test_bytes_declare_their_range_and_floats_do_not():
    from zetaclip.integrations._pictures import range_of

    leaks = []
    assert range_of(None, np.zeros((2, 8, 8), np.uint8), leaks) == (0.0, 255.0) and not leaks
    assert range_of(None, np.array([[[0.5, 2.0]]]), leaks) == (0.5, 2.0)
    assert leaks == ["bounds"]


def test_every_layout_is_read_as_channels_first():
    from zetaclip.integrations._pictures import channels_first

    x = np.arange(2 * 3 * 8 * 9).reshape(2, 3, 8, 9)
    assert np.array_equal(channels_first(x.transpose(0, 2, 3, 1)), x)
    assert np.array_equal(channels_first(x), x)
    assert channels_first(x[:, 0]).shape == (2, 1, 8, 9)


def test_undeclared_bounds_of_floats_are_a_leak():
    with pytest.warns(PrivacyLeakWarning, match="bounds"):
        classifier(bounds=None, epochs=1).fit(DIGITS.images[TRAIN], DIGITS.target[TRAIN])

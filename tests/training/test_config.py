"""Settings: what is refused, and which layer wins."""

import json

import numpy as np
import pytest

from zetaclip.training import Config, ConfigError
from zetaclip.training.layers import merge, read_file, read_settings


def test_an_option_of_the_method_is_shown_its_place():
    with pytest.raises(ConfigError, match=r"'sigma_b'; did you mean method_options\.sigma_b\?"):
        Config.from_mapping({"method": "quantile", "sigma_b": 3.0})
    with pytest.raises(ConfigError, match=r"'sigma_b'; did you mean sigma\?"):
        Config.from_mapping({"method": "dp-sgd", "sigma_b": 3.0})


def test_class_weights_by_words_and_by_table():
    assert Config(class_weight="no=1, yes=20.5").class_weight == {"no": 1.0, "yes": 20.5}
    assert Config.from_mapping({"class_weight": {"0": 3}}).class_weight == {"0": 3.0}
    assert Config().class_weight is None


def test_an_unknown_setting_names_the_near_ones():
    with pytest.raises(ConfigError, match=r"epsilons.*did you mean epsilon"):
        Config.from_mapping({"epsilons": 3})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epsilon": 1.0, "sigma": 1.0}, "not both"),
        ({"epochs": 1, "steps": 3}, "`epochs` or `steps`"),
        ({"epsilon": -1.0}, "`epsilon` must be positive"),
        ({"epsilon": float("inf")}, "`epsilon` must be positive"),
        ({"sigma": -0.5}, "at least 0"),
        ({"delta": 1.0}, "between 0 and 1"),
        ({"schedule": "square"}, "linear, late, cosine, constant"),
        ({"batch_size": 2.5}, "whole number"),
        ({"batch_size": 0}, "must be positive"),
        ({"seed": True}, "whole number"),
        ({"no_eval": 1}, "true or false"),
        ({"clipping": "medium"}, "'spectral' or a number"),
        ({"class_weight": "balanced"}, "computed from the data.*public knowledge"),
        ({"class_weight": {"a": "heavy"}}, "numbers by label"),
        ({"class_weight": "a=-1"}, "at least 0"),
        ({"clipping": 1.0, "clip": 2.0}, "leave `clip` out"),
        ({"validation": 1.0}, "share"),
        ({"weight_average": 1.0}, "decay"),
        ({"spectral": 3}, "table"),
        ({"data": None}, "needs a value"),
    ],
)
def test_what_can_not_be_used_is_refused_by_name(values, said):
    with pytest.raises(ConfigError, match=said):
        Config.from_mapping(values)


def test_whole_numbers_are_numbers_and_dashes_are_underscores():
    config = Config.from_mapping({"batch-size": 64.0, "epsilon": 3, "clipping": "1.5"})
    assert (config.batch_size, config.epsilon, config.clipping) == (64, 3.0, 1.5)
    assert isinstance(config.batch_size, int) and isinstance(config.epsilon, float)


def test_numbers_of_numpy_are_numbers():
    config = Config.from_mapping(
        {
            "epochs": np.int64(5),
            "epsilon": np.float32(0.5),
            "steps": None,
            "seed": np.int64(2**53 + 1),
        }
    )
    assert (config.epochs, config.epsilon, config.seed) == (5.0, 0.5, 2**53 + 1)
    assert (
        type(config.epochs) is float and type(config.epsilon) is float and type(config.seed) is int
    )
    assert Config.from_mapping({"batch_size": np.float64(64)}).batch_size == 64
    for values in (
        {"batch_size": np.float64(64.5)},
        {"batch_size": float("inf")},
        {"batch_size": True},
        {"epochs": True},
    ):
        with pytest.raises(ConfigError, match="takes a"):
            Config.from_mapping(values)


def test_it_survives_its_own_file(tmp_path):
    config = Config.from_mapping({"data": "mnist", "spectral": {"gain": 0.2}, "skew": 0.3})
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    assert Config.from_mapping(read_file(path)) == config
    assert json.loads(path.read_text())["zetaclip_run"] == 1


def test_set_takes_toml_values_in_tables():
    values = read_settings(
        [
            "spectral.gain=0.2",
            "spectral.bounds=[0.5, 2]",
            "method-options.ascent_batch=same",
            "lr=1e-3",
        ]
    )
    assert values == {
        "spectral": {"gain": 0.2, "bounds": [0.5, 2]},
        "method_options": {"ascent_batch": "same"},
        "lr": 1e-3,
    }
    with pytest.raises(ConfigError, match="key=value"):
        read_settings(["gain"])


def test_later_layers_win_and_tables_are_joined():
    assert merge(
        {"lr": 1, "spectral": {"gain": 1, "period": 2}}, {"lr": 2, "spectral": {"gain": 3}}
    ) == {
        "lr": 2,
        "spectral": {"gain": 3, "period": 2},
    }


def test_a_file_that_is_not_toml_says_so(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("epsilon = \n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_file(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_file(tmp_path / "missing.toml")

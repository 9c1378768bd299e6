"""Small runs that the tests of the trainer share."""

from zetaclip.training import Config, train

SMALL = {
    "data": "digits",
    "model": "mlp-2",
    "sigma": 2.0,
    "batch_size": 64,
    "steps": 30,
    "seed": 7,
    "threads": 1,
    "method": "ww-dp-sgd",
    "spectral": {"period": 5},
}


def small(**changes):
    return Config.from_mapping({**SMALL, **changes})


def run(out, config=None, **options):
    return train(config or small(), out, **options)

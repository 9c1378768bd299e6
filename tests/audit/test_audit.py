"""Audits of real trainings: tight where they can be, never above the claim, loud on mistakes."""

import json

import numpy as np
import pytest
import torch

from zetaclip import mechanism
from zetaclip.audit import audit, audit_pair
from zetaclip.audit._canaries import with_wrong_labels
from zetaclip.cli import main
from zetaclip.data import load
from zetaclip.errors import ConfigError, PrivacyLeakWarning
from zetaclip.ledger import Event, Ledger
from zetaclip.methods import names
from zetaclip.training.config import Config

ONE_STEP = {"data": "digits", "method": "dp-sgd", "model": "mlp", "steps": 1, "batch_size": 1437}


def one_step(epsilon=8.0, seed=1, **more):
    return Config(epsilon=epsilon, seed=seed, **{**ONE_STEP, **more})


def test_one_step_shows_much_of_the_claim_and_never_more():
    found = [audit(one_step(seed=seed)) for seed in range(1, 4)]
    assert all(1 < one.epsilon_found <= one.epsilon_claimed <= 8 for one in found)
    assert np.median([one.epsilon_found for one in found]) > 0.75 * 8
    assert not any(one.excess for one in found)


@pytest.mark.slow
def test_the_median_of_twenty_seeds_is_most_of_the_claim():
    found = [audit(one_step(seed=seed), confidence=0.95) for seed in range(20)]
    assert np.median([one.epsilon_found for one in found]) >= 0.8 * 8
    assert not any(one.excess for one in found)


def halve_noise(monkeypatch):
    whole = mechanism.add_noise
    monkeypatch.setattr(
        mechanism, "add_noise", lambda key, values, unit, std: whole(key, values, unit, std / 2)
    )


def add_twice(monkeypatch):
    once = mechanism.Mechanism.absorb

    def twice(self, chunk):
        once(self, chunk)
        self._sum *= 2

    monkeypatch.setattr(mechanism.Mechanism, "absorb", twice)


def forget_half(monkeypatch):
    whole = Ledger.events
    monkeypatch.setattr(
        Ledger,
        "events",
        lambda self: [Event(e.sample_rate, e.noise_multiplier, e.count // 2) for e in whole(self)],
    )


@pytest.mark.parametrize("mistake", [halve_noise, add_twice])
def test_a_mistake_behind_the_engines_back_exceeds_the_claim(mistake, monkeypatch):
    assert not audit(one_step(epsilon=3.0)).excess
    mistake(monkeypatch)
    found = audit(one_step(epsilon=3.0))
    assert found.excess and found.epsilon_found > found.epsilon_claimed
    assert "more than the claimed" in found.meaning


@pytest.mark.slow
def test_steps_that_are_missing_from_the_ledger_exceed_the_claim(monkeypatch):
    config = one_step(epsilon=3.0, steps=8)
    assert not audit(config, canaries=4000).excess
    forget_half(monkeypatch)
    assert audit(config, canaries=4000).excess


@pytest.mark.slow
@pytest.mark.parametrize("method", names(private=True))
def test_no_private_method_shows_more_than_it_claims(method):
    found = audit(
        Config(data="digits", method=method, model="mlp", epsilon=3.0, epochs=3, seed=2),
        canaries=500,
    )
    assert not found.excess
    assert found.epsilon_claimed <= 3.0001


def test_the_final_model_tells_less_than_the_transcript():
    found = audit(
        Config(data="digits", method="dp-sgd", epsilon=8.0, epochs=2, seed=1),
        canaries=200,
        attacker="final",
    )
    assert found.bound == "one run" and list(found.bounds) == ["one run", "f-dp"]
    assert not found.excess and found.epsilon_found < found.epsilon_claimed


@pytest.mark.slow
def test_the_final_model_tells_who_was_in_where_there_is_hardly_any_noise():
    found = audit(
        Config(
            data="digits",
            method="dp-sgd",
            model="mlp",
            sigma=0.02,
            epochs=100,
            lr=4.0,
            seed=1,
            accountant="rdp",
        ),
        canaries=400,
        attacker="final",
    )
    assert found.epsilon_found > 0.5


def test_canaries_have_wrong_labels_and_are_in_by_the_coins():
    dataset = load("digits")
    made, canaries, included = with_wrong_labels(dataset, 300, np.random.default_rng(0))
    assert len(made.train) == len(dataset.train) - 300 + included.sum()
    assert 100 < included.sum() < 200
    key = {x.numpy().tobytes(): int(y) for x, y in zip(dataset.train.x, dataset.train.y)}
    assert all(
        key[x.numpy().tobytes()] != int(y) for x, y in zip(canaries.train.x, canaries.train.y)
    )
    assert torch.equal(made.train.x[-included.sum() :], canaries.train.x[included])


def test_a_wrong_divisor_is_seen_by_two_data_sets():
    sound = audit_pair(noise_multiplier=0.6, runs=300, seed=1)
    literal = audit_pair(noise_multiplier=0.6, runs=300, seed=1, normalize="realized")
    assert not sound["excess"] and sound["epsilon_found"] > 1
    assert literal["excess"] and literal["epsilon_found"] > literal["epsilon_claimed"]


def test_two_records_clipped_as_one_are_seen_by_two_data_sets(monkeypatch):
    def absorb(self, chunk):
        gradients = torch.cat(list(chunk.pieces())).double()
        if len(gradients) % 2:
            gradients = torch.cat([gradients, torch.zeros_like(gradients[:1])])
        pairs = gradients[0::2] + gradients[1::2]
        norms = pairs.norm(dim=1, keepdim=True).clamp_min(1e-12)
        self._total().add_((pairs * (self.draw.clip / norms).clamp_max(1)).sum(0))

    monkeypatch.setattr(mechanism.Mechanism, "absorb", absorb)
    found = audit_pair(noise_multiplier=0.6, runs=300, seed=1)
    assert found["excess"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attacker": "nobody"}, "attacker is one of"),
        ({"canaries": 3}, "at least 10 canaries"),
        ({"confidence": 1.0}, "below 1"),
        ({"attacker": "final", "canaries": 1000}, "more than half"),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        audit(one_step(), **change)


def test_what_claims_nothing_is_not_audited():
    with pytest.raises(ConfigError, match="claims no ε"):
        audit(Config(data="digits", method="sgd", steps=1))
    with pytest.raises(ConfigError, match="claim no finite ε"):
        audit(one_step(epsilon=None, sigma=0.0))


def command(words):
    return main(["audit", *words.split()])


PLAIN = "--data digits --method dp-sgd --model mlp --epsilon 8 --steps 1 --batch-size 1437 --seed 1"


def test_the_command_prints_json(capsys):
    assert command(f"{PLAIN} --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"epsilon_claimed", "epsilon_found", "confidence", "bound", "canaries"} <= set(found)
    counts = found["scores"]["included"], found["scores"]["excluded"]
    assert sum(map(sum, counts)) == 1000
    assert len(found["scores"]["edges"]) == 41


def test_the_command_audits_two_data_sets_and_says_so(capsys):
    assert command(f"{PLAIN} --attacker pair --runs 100") == 0
    out = capsys.readouterr().out
    assert "ε claimed 7.99" in out and "200 runs" in out and "nothing contradicts" in out


def test_the_command_fails_where_the_claim_is_broken(capsys):
    assert command(f"{PLAIN} --attacker pair --runs 400 --normalize realized") == 1
    assert "MORE THAN CLAIMED" in capsys.readouterr().out


def test_long_pairs_and_spectral_methods_are_refused_with_a_way_out(capsys):
    pair = "--data digits --attacker pair --epsilon 8"
    assert command(f"{pair} --method ww-dp-sgd --steps 1") == 2
    assert "--attacker transcript" in capsys.readouterr().err
    assert command(f"{pair} --method dp-sgd --steps 500") == 2
    assert "--steps 1" in capsys.readouterr().err


@pytest.mark.parametrize("unit", [None, "who"])
def test_a_run_that_took_n_from_its_data_is_audited_at_its_own_epsilon(tmp_path, unit):
    """Canaries must not count as records: N would be larger, and q and ε smaller than the run's."""
    path = tmp_path / "t.csv"
    path.write_text(
        "x,who,y\n" + "".join(f"{i % 7},{i // 2},{'ab'[i % 3 // 2]}\n" for i in range(400))
    )
    settings = {
        "data": str(path),
        "target": "y",
        "unit": unit,
        "epsilon": 3.0,
        "steps": 2,
        "seed": 1,
    }
    with pytest.warns(PrivacyLeakWarning):
        found = audit(Config(**settings, method="dp-sgd", batch_size=50), canaries=400)
    records = 160 if unit else 320  # about: a fifth is held out
    assert found.sample_rate == pytest.approx(50 / records, rel=0.1)
    assert found.epsilon_claimed == pytest.approx(3, rel=0.02)

"""Replace the mechanism's outputs by a recording and delete the data: the same weights and the same
C must come out."""

import pytest
import torch
from helpers import flat, mean_loss, private, toy_data, train
from toys import METHODS, FromWeights, network

from zetaclip.mechanism import Mechanism


def run(name, data, clipping=None):
    _, module, optimizer, loader = private(
        network(), data, method=METHODS[name](), clipping=clipping, lr=0.1
    )
    clips = []
    for _ in range(4):
        train(module, optimizer, loader, mean_loss, steps=1)
        clips.append(optimizer.clip)
    return flat(module), clips, optimizer.clip_history


@pytest.mark.parametrize("name", list(METHODS))
def test_everything_follows_from_the_releases(name, monkeypatch):
    recording = []
    release = Mechanism.release

    def recorder(self, *args):
        released = release(self, *args)
        recording.append(released)
        return released

    monkeypatch.setattr(Mechanism, "release", recorder)
    weights, clips, history = run(name, toy_data())
    assert len(recording) == 4 * (2 if "sam" in name else 1)

    replayed = iter(recording)
    monkeypatch.setattr(Mechanism, "absorb", lambda self, chunk, last=False: None)
    monkeypatch.setattr(Mechanism, "release", lambda self, *args: next(replayed))
    no_data = (torch.zeros(24, 6), torch.zeros(24, dtype=torch.long))
    again, clips_again, history_again = run(name, no_data)
    assert torch.equal(weights, again) and clips == clips_again and history == history_again


def test_the_firewall_catches_a_peek(monkeypatch):
    """A controller that looks at data gives another C on other data, and the comparison above would
    see it."""
    peeked = toy_data()

    class Peeking:
        def bind(self, module, trained):
            return self

        def read(self, module, step):
            return float(peeked[0].abs().max())

    def clips():
        from zetaclip import Method

        _, module, optimizer, loader = private(
            network(),
            toy_data(),
            method=Method("peek", controller=FromWeights(Peeking())),
            clipping=None,
        )
        train(module, optimizer, loader, mean_loss)
        return optimizer.clip

    first = clips()
    peeked = (peeked[0] * 0.01, peeked[1])
    assert clips() != first

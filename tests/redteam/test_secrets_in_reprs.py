"""A repr gets into logs, tracebacks and debuggers: it must not hold a key from which noise or
batches follow."""

import dataclasses

import pytest
from helpers import mean_loss, private, tiny, toy_data, train

from zetaclip import methods
from zetaclip.engine._checkpoint import _files
from zetaclip.mechanism import Draw
from zetaclip.randomness import Stream


def walked(root):
    """Every object of zetaclip that can be reached from ``root`` through attributes and
    containers."""
    found, waiting, seen = [], [root], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None), type)):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif type(value).__module__.startswith("zetaclip"):
            found.append(value)
            waiting += vars(value).values() if hasattr(value, "__dict__") else ()
    return found


def keys_in(found):
    """All secrets that the objects hold, found by their kind: 32 bytes."""
    kept = set()
    for value in found:
        for item in vars(value).values() if hasattr(value, "__dict__") else ():
            if isinstance(item, bytes) and len(item) == 32:
                kept.add(item)
    return kept


def tells(text, key):
    """Whether a text holds half of a key, in any of the ways in which bytes are written."""
    return any(
        part in text
        for half in (key[:16], key[16:])
        for part in (
            repr(half)[2:-1],
            half.hex(),
            str(list(half))[1:-1],
            str(int.from_bytes(half, "little")),
        )
    )


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A run with a batch out, after some steps, and what was read when its checkpoint was
    loaded."""
    path = tmp_path_factory.mktemp("run") / "run.pt"
    sam = methods.get("dp-sam", ascent_batch="same")
    options = {
        "method": sam,
        "clipping": None,
        "epochs": 4,
        "target_delta": 1e-5,
        "physical_batch_size": 5,
        "seed": None,
    }
    engine, module, optimizer, loader = private(tiny(), toy_data(), **options)
    train(module, optimizer, loader, mean_loss, steps=1)
    engine.save(path)
    again, module, optimizer, loader = private(tiny(), toy_data(), **options)
    caught = []
    take = _files._take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_files, "_take", lambda *given: caught.append(given[4]) or take(*given))
        again.load(path, replay=True)
    train(module, optimizer, loader, mean_loss, steps=1)
    for batch in loader:
        if again._loop.state.phase == 1:  # the second pass is out: the key of the first is kept
            break
        mean_loss(module, batch).backward()
        optimizer.step()
    yield [engine, again, optimizer, loader, again._loop.state, *caught]
    again.detach()


def test_the_walk_meets_what_holds_keys(live):
    names = {type(value).__name__ for value in walked(live)}
    assert names >= {
        "PrivateLoop",
        "RunState",
        "OpenBatch",
        "Drawn",
        "Batches",
        "ForwardRng",
        "Draw",
        "Mechanism",
        "PrivacyEngine",
        "Found",
    }
    assert len(keys_in(walked(live))) >= 6


@pytest.mark.parametrize("draw", [False, True], ids=["all but Draw", "Draw"])
def test_no_repr_tells_a_key(live, draw):
    found = walked(live)
    keys = keys_in(found)
    for value in found:
        if isinstance(value, Draw) is draw:
            text = f"{value!r} {value!s}"
            assert not any(tells(text, key) for key in keys), type(value).__name__


def test_no_dataclass_of_the_package_shows_bytes():
    """Also of those that were not met in a run: a field of bytes stays out of the repr."""
    import importlib
    import pkgutil

    import zetaclip

    keyless = ("integrations", "experiments", "report", "data", "__main__")
    for part in pkgutil.walk_packages(zetaclip.__path__, "zetaclip."):
        found = (
            ()
            if part.name.split(".")[1] in keyless
            else vars(importlib.import_module(part.name)).values()
        )
        for kind in found:
            if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind is not Draw:
                shown = [
                    field.name
                    for field in dataclasses.fields(kind)
                    if "bytes" in str(field.type) and field.repr
                ]
                assert not shown, f"{kind.__name__}: {shown}"


def test_a_repr_with_a_key_is_seen():
    key = Stream.seeded(1, "noise").state
    for text in (repr(key), key.hex(), repr({"noise": key}), str(list(key)), f"x{key.hex()[:32]}"):
        assert tells(text, key), text
    assert not tells(repr(Stream(key)), key)

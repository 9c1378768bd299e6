"""The module as a whole: shapes, mirrors, repeatability, the cache, export, many pictures."""

import subprocess
import sys

import pytest
import torch

from zetaclip.data import Dataset, Split
from zetaclip.errors import InputError
from zetaclip.features import _patches as module
from zetaclip.features import build, features_of, patches, precompute, rebuilt
from zetaclip.features._frame import framed
from zetaclip.features._patches import Settings, fits, from_settings, settings_for


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(12, 12), (13, 12), (17, 30)])
def test_rows_have_unit_length_and_a_constant_column(small, channels, size):
    made = small(channels=channels, height=size[0], width=size[1])
    x = torch.rand(5, channels, *size) * 2 - 1
    z = made(x)
    assert z.shape == (5, made.columns) == (5, 4 * 6 + 1)
    torch.testing.assert_close(z[:, :-1].norm(dim=1), torch.ones(5))
    assert (z[:, -1] == 0.1).all()
    torch.testing.assert_close(made(x[2:3]), z[2:3], rtol=1e-4, atol=1e-5)  # by itself
    assert not list(made.parameters())


def test_a_flat_picture_has_finite_features(small):
    z = small()(torch.zeros(2, 3, 12, 12))
    assert z.isfinite().all() and z.norm(dim=1).max() < 1.2


def test_with_a_mirror_a_picture_and_its_mirror_image_are_the_same(small):
    x = torch.rand(6, 3, 12, 12) * 2 - 1
    made = small(mirror=True)
    torch.testing.assert_close(made(x), made(x.flip(3)), rtol=0, atol=2e-4)
    assert (made(x) - made(x.flip(2))).abs().max() > 0.05  # upside down is not
    plain = small(mirror=False)
    assert (plain(x) - plain(x.flip(3))).abs().max() > 0.05


def test_blocks_that_share_a_first_layer_give_what_each_gives_alone(small):
    made, x = small(), torch.rand(3, 3, 12, 12) * 2 - 1
    assert torch.equal(made.blocks[2].bank.weight, made.blocks[3].bank.weight)
    alone = torch.cat([block.whitened(block.pooled(x)) for block in made.blocks], 1) / 2
    torch.testing.assert_close(made(x)[:, :-1], alone)


def test_the_first_blocks_see_framed_pictures_and_the_others_plain_ones(small):
    kept = {"channels": 1, "mirror": False}
    plain, mixed, x = small(**kept), small(**kept, framed=3), pictures_of(5, (1, 12, 12))
    for number, block in enumerate(mixed.blocks):
        seen = framed(x) if number < 3 else x
        columns = slice(6 * number, 6 * number + 6)
        alone = block.whitened(block.pooled(seen)) / 2
        torch.testing.assert_close(mixed(x)[:, columns], alone)
        # Their constants are made from such pictures, too.
        same = torch.equal(block.bank.weight, plain.blocks[number].bank.weight)
        assert same == (number == 3)


def test_whitened_features_of_the_synthetic_pictures_are_uncorrelated(settings, small):
    """Up to the unit length, which comes after the whitening."""
    from zetaclip.features._draws import Draws
    from zetaclip.features._synthetic import pictures

    own, made = settings(), small()
    x = torch.cat([pictures(kind, count, (3, 12, 12)) for kind, count in own.pictures])
    x = x[Draws("order", 0).order(len(x))].float()
    block = made.blocks[0]
    z = (block.pooled(x) - block.mean) @ block.project.T
    covariance = z.T.cov(correction=0)
    assert (covariance - covariance.diag().diag()).abs().max() < 1e-3
    assert z.mean(0).abs().max() < 1e-3
    torch.testing.assert_close(covariance[3, 3], torch.tensor(0.5), rtol=1e-3, atol=0)


_PROGRAM = """
import torch
torch.set_num_threads({threads})
from conftest import tiny
from zetaclip.features._patches import from_settings
made = from_settings(tiny())
z = made(torch.linspace(-1, 1, 432).reshape(1, 3, 12, 12))
print(z.double().tolist())
"""


def test_constants_do_not_depend_on_process_or_threads(tmp_path):
    import os

    found = []
    for threads in (1, 2):
        run = subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(threads=threads)],
            env={
                **os.environ,
                "ZETACLIP_CACHE": str(tmp_path / str(threads)),
                "PYTHONPATH": os.pathsep.join(
                    [os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
                ),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(torch.tensor(eval(run.stdout)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


def test_another_seed_gives_other_features(small):
    x = torch.rand(2, 3, 12, 12) * 2 - 1
    assert (small()(x) - small(seed=1)(x)).abs().max() > 0.05


# -- the cache


def test_constants_are_made_once_and_a_damaged_file_is_made_anew(
    settings, small, tmp_path, monkeypatch
):
    made, x = small(), torch.rand(2, 3, 12, 12)
    calls, make = [], module._make
    monkeypatch.setattr(module, "_make", lambda *given: calls.append(1) or make(*given))
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    assert torch.equal(small()(x), made(x)) and not calls
    for damaged in (whole[:-1], whole[:1000], b"", whole[:-4] + b"\x01\x02\x03\x04"):
        file.write_bytes(damaged)
        assert torch.equal(small()(x), made(x))
        assert calls == [1] and file.read_bytes() == whole
        calls.clear()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [file.name]


def test_without_a_cache_that_can_be_written_constants_are_made_each_time(
    small, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZETACLIP_CACHE", str(tmp_path / "file"))
    assert small()(torch.zeros(1, 3, 12, 12)).isfinite().all()


def test_the_digest_follows_the_settings_and_not_the_size_before_the_averaging(settings):
    assert settings().digest() == settings().digest()
    changes = ({}, {"seed": 1}, {"mirror": False}, {"framed": 1}, {"framed": 2})
    assert len({settings(**change).digest() for change in changes}) == 5
    large = Settings((3, 50, 50), settings().blocks, settings().pictures)
    assert large.digest() == settings().digest()
    assert from_settings(large)(torch.zeros(1, 3, 50, 50)).shape == (1, 25)


def test_what_was_made_before_there_were_frames_keeps_its_name():
    """Digests of an earlier version; models that were trained with it can still be loaded."""
    for shape, digest in (((1, 8, 8), "f2ee36d66b53976e"), ((3, 32, 32), "10c32c787d03d3b5")):
        assert settings_for(shape).digest().startswith(digest)


# -- settings


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 9, 12, 16, 23, 24, 28, 32, 33, 64, 96, 224])
def test_there_are_settings_for_every_size(channels, size):
    """Not made, which takes minutes; every map must be large enough for what comes next."""
    shape = channels, size, size
    found = settings_for(shape)
    assert fits(shape) and found.columns == sum(block.keep for block in found.blocks) + 1
    pictures = sum(count for _, count in found.pictures)
    for block in found.blocks:
        assert block.mirror == (channels == 3) and max(block.size) <= max(32, size)
        assert block.keep <= min(block.pooled, pictures) and block.ridge < block.keep
        across = (block.size[1] + 2 * block.pad - block.side) // block.stride + 1
        if block.second is not None:
            across = across // 2 // block.second.pool - 2
            assert block.second.channels <= 2 * block.filters
        assert across >= block.grid
    assert settings_for(shape, mirror=True).blocks[0].mirror


@pytest.mark.parametrize("shape", [(2, 16, 16), (3, 7, 16), (1, 16, 225), (20,), (3, 4)])
def test_other_shapes_are_refused(shape):
    assert not fits(shape)
    with pytest.raises(InputError, match="pictures of"):
        patches(shape)


def test_unknown_features_and_options_are_refused():
    with pytest.raises(InputError, match="there are: patches, scattering"):
        build("patch", (1, 8, 8))
    with pytest.raises(InputError, match="it has mirror"):
        build("patches", (1, 8, 8), {"mirorr": True})
    with pytest.raises(InputError, match="true or false"):
        build("patches", (1, 8, 8), {"mirror": "yes"})
    with pytest.raises(InputError, match="it has length"):
        build("scattering", (1, 8, 8), {"mirror": True})


# -- many pictures


def pictures_of(count, shape=(3, 12, 12)):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(5)) * 2 - 1


def test_features_of_many_are_those_of_the_module_whatever_the_threads(small):
    made, x = small(), pictures_of(600)
    done = []
    one = features_of(made, x, done.append)
    assert sum(done) == 600 and len(done) == 3
    torch.testing.assert_close(one, made(x), rtol=1e-4, atol=1e-5)
    torch.set_num_threads(2)
    assert torch.equal(features_of(made, x), one)
    assert torch.get_num_threads() == 2 and torch.is_grad_enabled()


def test_precompute_replaces_pictures_and_says_so(small):
    made = small()
    dataset = Dataset(
        "mine", "classification", Split(pictures_of(20), torch.zeros(20)), None, 2, "one image"
    )
    found = precompute(dataset, made)
    assert found.test is None and found.train.x.shape == (20, made.columns)
    assert torch.equal(found.train.y, dataset.train.y)
    assert found.feature_map == made.describe()
    assert "fixed in advance" in found.notes[-1] and "no real one" in found.notes[-1]


def test_one_record_does_not_change_the_features_of_another(small):
    made, x = small(), pictures_of(40)
    other = x.clone()
    other[7] = -other[7]
    changed = (features_of(made, x) != features_of(made, other)).any(1)
    assert changed.nonzero().flatten().tolist() == [7]


def test_the_state_dict_carries_everything(small, settings):
    made, x = small(), pictures_of(3)
    other = module.Patches(
        settings(), [module.BlockModule(block, (3, 12, 12)) for block in settings().blocks]
    )
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(x), made(x))


@pytest.mark.parametrize("framed", [0, 2])
def test_the_module_can_be_exported(small, framed):
    made, x = small(framed=framed), pictures_of(4)
    rows = torch.export.Dim("rows", min=2, max=512)
    program = torch.export.export(made, (x,), dynamic_shapes=({0: rows},))
    many = pictures_of(70)
    torch.testing.assert_close(program.module()(many), made(many), rtol=1e-4, atol=1e-5)


def test_a_description_gives_the_same_features_or_an_error():
    made = patches((1, 8, 8))
    described = made.describe()
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(rebuilt(described)(x), made(x))
    with pytest.raises(InputError, match="another version"):
        rebuilt({**described, "digest": "0" * 64})

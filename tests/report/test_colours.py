"""The palette, measured: contrast with the ground, and distances as colour-blind readers see
them."""

import itertools

import numpy as np
import pytest

from zetaclip.report.colours import DARK, GROUNDS, LIGHT

# Machado, Oliveira and Fernandes (2009), severity 1, for linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritan": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])

# A difference of 2.3 can just be seen side by side; lines of a chart need several times that.
APART = 20.0


def linear(colour):
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    bright, dark = sorted((TO_XYZ[1] @ linear(a), TO_XYZ[1] @ linear(b)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def lab(colour, matrix):
    xyz = TO_XYZ @ np.clip(matrix @ linear(colour), 0, 1) / (TO_XYZ @ np.ones(3))
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def closest(palette, matrix):
    return min(
        (float(np.linalg.norm(lab(a, matrix) - lab(b, matrix))), a, b)
        for a, b in itertools.combinations(palette, 2)
    )


@pytest.mark.parametrize(("palette", "theme"), [(LIGHT, "light"), (DARK, "dark")])
def test_every_line_stands_out_from_its_ground(palette, theme):
    assert {
        colour: contrast(colour, GROUNDS[theme])
        for colour in palette
        if contrast(colour, GROUNDS[theme]) < 3
    } == {}


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_stay_apart(palette, blindness):
    distance, a, b = closest(palette, BLINDNESS[blindness])
    assert distance > APART, f"{a} and {b} are {distance:.1f} apart"


def test_the_measure_rejects_a_palette_that_is_known_to_fail():
    # matplotlib's red and green, and its brown: what these simulations exist for
    assert (
        min(
            closest(("#d62728", "#2ca02c", "#8c564b"), BLINDNESS[kind])[0]
            for kind in ("protan", "deutan")
        )
        < APART
    )

"""Pages whose prose is broken into lines."""

import random

from zetaclip.words import wrapped


def test_prose_is_broken_and_everything_else_stays():
    long = "word " * 40
    page = f"# {long}\n\n| {long} |\n![{long}](a.png)\n```\n{long}\n```\nshort\n- {long.strip()}\n"
    lines = wrapped(page).split("\n")
    assert lines[:8] == page.split("\n")[:8]
    assert all(len(line) <= 100 for line in lines[8:])
    assert lines[8].startswith("- word") and lines[9].startswith("  word")


def test_no_word_is_lost_and_no_line_begins_a_list_by_accident():
    draw = random.Random(0)
    words = [draw.choice(["a", "-", "12.", "#", "|", "+", "gain", "x" * 30]) for _ in range(600)]
    text = "begin " + " ".join(words)
    lines = wrapped(text).split("\n")
    assert " ".join(lines) == text and len(lines) > 10
    assert not any(line.split()[0] in ("-", "12.", "#", "|", "+") for line in lines)


def test_code_is_not_broken():
    command = "`zetaclip reproduce accuracy --only data=mnist`"
    lines = wrapped(f"{'word ' * 15}run {command}, then look").split("\n")
    assert lines[1].startswith(command) and len(lines) == 2


def test_a_word_that_is_too_long_has_its_own_line():
    assert wrapped("see " + "y" * 120 + " there").split("\n") == ["see", "y" * 120, "there"]

"""What the page of `no-tuning` says about tasks that miss the goal."""

import pytest

from zetaclip.experiments import _regret_misses as misses
from zetaclip.experiments import _regret_page as page
from zetaclip.experiments._tasks import TASKS, TWINS, Task, problem_of

_LABELS = {task.label for task in TASKS}


def cell(task="heart", epsilon=1.0, seed=1, own=80.0, twice=80.0, half=80.0, clips=None):
    return {
        "task": task, "epsilon": epsilon, "seed": seed, "constant": 50.0, "clip": 0.25,
        "ladder": {"-1": half, "0": own, "1": twice},
        "tried": {}, "clips": clips or {}, "others": {},
    }  # fmt: skip


def told(parts):
    return " ".join(parts)


def test_a_rate_between_two_rungs_is_one_of_those_the_best_is_chosen_from():
    """The law's rate has moved by 1.4 since the ladder was run."""
    between = [{**cell(seed=s, twice=82.0), "rate": 1.0, "own_rate": 1.4} for s in (1, 2)]
    (line,) = page.summary([{**c, "own": 84.0} for c in between])
    assert line["regret"]["auto"] == (0.0, 0.0)
    assert (line["best"], line["best_factor"]) == (84.0, 1.0)
    (line,) = page.summary([{**c, "own": 81.0} for c in between])
    assert line["regret"]["auto"][0] == pytest.approx(1.0)
    assert line["best_factor"] == pytest.approx(2 / 1.4)


def test_the_goal_is_twice_as_wide_for_the_half_that_nobody_tuned_on():
    lines = page.summary([cell("heart", twice=86.0), cell("iris", twice=86.0)])
    rows = {row.split("|")[1].strip(): row for row in misses.goals(lines)[4:6]}
    assert rows["all"].count("**missed**") == 3
    (untouched,) = [row for row in misses.goals(lines) if "untouched" in row]
    assert "met: 6.00 (goal 8)" in untouched and untouched.count("**missed**") == 2


def test_a_large_regret_has_its_reason_beside_it():
    """The twin has none of it, and the rate that suits it costs another task."""
    cells = [cell("xor, 64", seed=s, twice=90.0 + s) for s in (1, 2, 3)]
    cells += [cell("straight, 64", seed=s, half=80.0 + s / 10) for s in (1, 2, 3)]
    cells += [cell("digits, 64", twice=70.0), cell("heart, 64", twice=80.1), cell("iris")]
    lines = page.summary([c for c in cells if c["task"] in _LABELS])
    text = told(misses.large(cells, lines))
    assert "**xor, 64, ε 1**: 12.00 ± 2.48 points over 3 seeds." in text
    assert "2 times the law's rate is best here. Its signals are products" in text
    assert "regret is 0.20 ± 0.25, and 0.5 times the law's rate is best." in text
    assert "On 2 other tasks with this network it costs more than 0.3 points on 1" in text
    assert "-10.0 (digits, 64) to +0.1 (heart, 64)" in text and "iris" not in text
    without = [c for c in cells if c["task"] != "straight, 64"]
    assert "has not run" in told(misses.large(without, lines))
    wide = [cell("iris", seed=s, twice=t) for s, t in ((1, 80.0), (2, 90.0))]
    assert "below 4 is not excluded" in told(misses.large(wide, page.summary(wide)))
    fine = [cell("iris", twice=83.9)]
    assert "No task has a regret above 4 points." in misses.large(fine, page.summary(fine))


def test_a_fall_is_a_miss_only_beyond_the_spread():
    def steps(task, falls, best=80.0):
        return [
            cell(task, epsilon, seed, own, *[best if epsilon == 3 else 80.0] * 2)
            for seed, fall in enumerate(falls)
            for epsilon, own in ((1.0, 80.0), (3.0, 80.0 - fall))
        ]

    cells = steps("a", (2.0, 2.1, 1.9), 79.9) + steps("b", (9.0, -3.0, 1.0)) + steps("c", (1.0,))
    cells += steps("d", (-1.0, -1.0)) + steps("e", (2.0, 2.0), 78.5)
    cells += steps("lognormal", (2.0, 2.0), 80.0)
    lines = page.summary(cells)
    twin = steps("logarithms", (-0.5, -0.7))
    text = misses.falls(cells + twin, lines)
    rows = {row.split("|")[1].strip(): row for row in text if row.startswith("| ")}
    assert "beyond it: a miss" in rows["a"] and rows["a"].endswith("| -0.10 |")
    assert "within the spread" in rows["b"] and "one seed can't tell" in rows["c"]
    assert "d" not in rows and "logarithms" not in rows
    assert "3 do, of 5 steps" in told(text)
    assert "- **a, ε 1 to 3**: Most of it is the law's rate: at the best rates it is -0.10." in text
    assert "- **e, ε 1 to 3**: It is not the rate, and no other reason was measured." in text
    (one,) = (row for row in text if row.startswith("- **lognormal, ε 1 to 3**"))
    assert one.endswith("all else the same, the step is +0.60 ± 1.27.")
    assert any("logarithms of the targets has not run" in row for row in misses.falls(cells, lines))
    assert misses.falls(steps("d", (-1.0,)), page.summary(steps("d", (-1.0,))))[0].startswith("No")


def test_c_is_judged_against_what_it_may_move_and_the_spread():
    def moved(task, shifts):
        return [
            cell(task, seed=s, clips={"0.02": 80.0 + shift, "0.1": 80.1})
            for s, shift in enumerate(shifts)
        ]

    cells = moved("rare, 64", (1.0, 1.1, 0.9)) + moved("heart", (0.5, 0.2, 0.4))
    cells += moved("ved", (-2.0,)) + moved("tiny", (0.2, 0.3)) + moved("wine", (2.0, 2.0))
    cells += moved("balanced, 64", (0.5, 0.7))
    text = misses.moved_by_clip(cells)
    rows = {row.split("|")[1].strip(): row for row in text if row.startswith("| ")}
    assert "beyond it: a miss" in rows["rare, 64"] and "within the spread" in rows["heart"]
    assert "one seed can't tell" in rows["ved"] and not {"tiny", "balanced, 64"} & set(rows)
    assert text[0] == "4 of 10 means move by more than 0.3 points; 2 do so"
    assert (
        "- **rare, 64, ε 1, C = 0.02**: 3 % of its records are positive: with half of them positive"
        " and all else the same, it moves by +0.60 ± 1.27."
    ) in text
    assert "- **wine, ε 1, C = 0.02**: No reason was measured." in text
    for one in cells:  # the same C with a larger rate is a reason, and no C of its own
        if one["task"] == "wine":
            one["clips"] |= {"0.02 x 1.4": 80.1, "0.02 x 2": 80.4}
    text = misses.moved_by_clip(cells)
    assert text[0] == "4 of 10 means move by more than 0.3 points; 2 do so"
    (said,) = (row for row in text if row.startswith("- **wine"))
    assert said.endswith(
        "+0.10 ± 0.00 with 1.4 times the rate, +0.40 ± 0.00 with 2 times the rate."
    )
    assert misses.moved_by_clip(moved("tiny", (0.1,)))[0].startswith("None of 2 means moves")


@pytest.mark.parametrize("label", TWINS)
def test_a_twin_differs_from_its_task_in_the_reason_alone(label):
    """As many records and columns, the same network and ε; and it is no task of its own."""
    (task,) = (task for task in TASKS if task.label == label)
    twin = TWINS[label][2]
    assert twin.label not in _LABELS
    assert (twin.hidden, twin.seeds, twin.epsilons) == (task.hidden, task.seeds, task.epsilons)
    one, other = problem_of(task, 1), problem_of(twin, 1)
    assert one.x.shape == other.x.shape and one.outputs == other.outputs
    assert one.regression == other.regression
    if task.name == "narrow":
        assert (one.y == other.y).all()
        assert other.x.std(0).min() > 0.3 > 6 * one.x.std(0).min()
    if task.name == "xor":
        assert abs(_correlation(one)) < 0.05 < 0.4 < abs(_correlation(other))
    if task.name == "lognormal":
        assert (one.x == other.x).all()
        assert float(one.y.median()) < -0.6 < -0.2 < float(other.y.median())
    if task.name == "rare":
        assert float(one.y.float().mean()) < 0.06 < 0.4 < float(other.y.float().mean())


def _correlation(problem):
    return float(((problem.x[:, 0] * (problem.y - 0.5)).mean()) / problem.x[:, 0].std() / 0.5)


def test_twins_run_with_their_task_and_count_in_no_figure(tmp_path, monkeypatch):
    from zetaclip.experiments import regret

    task = Task("wine", (), 1, True, "", (1.0,))
    twin = Task("iris", (), 1, False, "", (1.0,))
    for module in (regret, page, misses):
        monkeypatch.setattr(module, "TASKS", (task,))
    for module in (regret, misses):
        monkeypatch.setattr(module, "TWINS", {"wine": ("Why", "something else", twin)})
    said = regret.run(tmp_path, say=lambda text: None)
    found = regret.read(tmp_path / "no-tuning" / "cells.jsonl")
    assert [one["task"] for one in found] == ["wine", "iris"]
    assert found[1]["others"] == {} != found[0]["others"]
    assert "1 of 1 cells" in said and "1 of 1 cells" in regret.write(tmp_path / "no-tuning")
    assert "iris" not in (tmp_path / "no-tuning" / "regret.md").read_text()

"""Replay and Schedule: C follows the plan, whatever is read."""

import math

import pytest

from zetaclip.control import Controller, Replay, Schedule


def follow(controller, updates):
    """C used at update 0, 1, ..., and the history, driven as a training loop drives it."""
    state, used, history = controller.init(), [], []
    probe = controller.probe.bind(None, {})
    for done in range(1, updates + 1):
        used.append(state.clip)
        reading = probe.read(None, done)
        state = controller.update(reading, state)
        if controller.entry(state) is not None:
            history.append(controller.entry(state))
    return used, history


def test_schedule_is_the_function_of_the_update_number():
    used, history = follow(Schedule(lambda t: 1.0 + 0.5 * (t // 3)), 7)
    assert used == [1.0, 1.0, 1.0, 1.5, 1.5, 1.5, 2.0]
    assert history == [(3, None, None, 0.0, 1.5, ""), (6, None, None, 0.0, 2.0, "")]


def test_replay_of_a_list_keeps_its_last_value():
    assert follow(Replay([1.0, 2.0, 0.5]), 5)[0] == [1.0, 2.0, 0.5, 0.5, 0.5]


def test_replay_of_a_mapping_and_of_pairs():
    assert follow(Replay({0: 1.0, 2: 3.0}), 4)[0] == [1.0, 1.0, 3.0, 3.0]
    assert follow(Replay([(2, 3.0), (3, 4.0)], initial=1.0), 4)[0] == [1.0, 1.0, 3.0, 4.0]


def test_replay_of_a_history_uses_what_the_other_run_used():
    history = [(2, 5.0, 5.0, 0.5, 1.05, ""), (4, 6.0, 5.5, 0.7, 1.12, "max")]
    used, own = follow(Replay(history, initial=1.0), 6)
    assert used == [1.0, 1.0, 1.05, 1.05, 1.12, 1.12]
    # and what it writes itself can be replayed again
    assert follow(Replay(own, initial=1.0), 6)[0] == used


def test_they_are_controllers_that_read_no_weights():
    assert isinstance(Replay([1.0]), Controller) and isinstance(Schedule(lambda t: 1.0), Controller)
    assert "3 values" in repr(Replay([1.0, 2.0, 3.0]))
    assert repr(Replay([1.0, 2.0])) == repr(Replay([1.0, 2.0])) != repr(Replay([1.0, 2.5]))


@pytest.mark.parametrize(
    ("schedule", "initial", "message"),
    [
        ([], None, "empty"),
        ([1.0, -1.0], None, "positive"),
        ([(5, 1.0)], None, "initial="),
        ([(0, 1.0)], 2.0, "step 0"),
        ([(0, 1.0), (4, 2.0), (4, 3.0)], None, "must rise"),
    ],
)
def test_wrong_schedules(schedule, initial, message):
    with pytest.raises(ValueError, match=message):
        Replay(schedule, initial)


def test_a_function_that_leaves_the_range_is_stopped_when_it_does():
    controller = Schedule(lambda t: 1.0 if t < 2 else math.nan)
    with pytest.raises(ValueError, match="positive and finite"):
        follow(controller, 5)
    with pytest.raises(TypeError, match="use Replay"):
        Schedule([1.0, 2.0])

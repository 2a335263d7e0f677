from __future__ import annotations

from tests.helpers.samples import group_of, sample

from ratchet.actors.window import Made, Window


def test_lengths_are_of_rollouts_and_rewards_of_whole_trajectories() -> None:
    group = group_of(
        sample(1.0, length=3, trajectory=0),
        sample(1.0, length=5, trajectory=0),
        sample(0.5, length=7),
        sample(9.0, length=11, finish="abort"),
    )
    made = Made.of(group, 2.0)
    assert sorted(made.tokens) == [3, 5, 7, 11]
    assert sorted(made.rewards) == [0.5, 1.0]


def test_each_place_has_its_own_lengths_rewards_and_times() -> None:
    window = Window()
    short = Made.of(group_of(sample(1.0, length=2)), 10.0)
    long = Made.of(group_of(sample(0.0, length=50)), 30.0)
    window.finished("p0", short, 4.0)
    window.finished("p1", long, 5.0)
    window.has_trained("p0", short, 13.0)
    window.has_lost("p1", long)
    offered, trained, lost = (each.read() for each in (window.offered, window.trained, window.lost))
    assert (offered.groups, trained.groups, lost.groups) == (2, 1, 1)
    assert offered.tokens.mean == 26.0
    assert (trained.tokens.mean, trained.rewards.mean) == (2.0, 1.0)
    assert (lost.tokens.mean, lost.rewards.mean) == (50.0, 0.0)
    assert window.claim_to_finish.read().histogram == {6.0: 1, 25.0: 1}
    assert window.finish_to_train.read().histogram == {3.0: 1}
    assert offered.task_rewards == {}


def test_what_an_earlier_life_has_made_counts_and_is_in_no_distribution() -> None:
    window = Window()
    window.has_trained("p0", None, 3.0)
    window.has_lost("p1", None)
    trained, lost = window.trained.read(), window.lost.read()
    assert (trained.groups, lost.groups) == (1, 1)
    assert trained.tokens.count == lost.rewards.count == window.finish_to_train.read().count == 0


def test_rewards_are_by_task_where_there_are_several() -> None:
    window = Window(by_task=True)
    for prompt_id, reward in (("sums/1", 1.0), ("sums/2", 0.0), ("copy/1", 0.25)):
        window.finished(prompt_id, Made.of(group_of(sample(reward)), 1.0), 0.0)
    found = window.offered.read().task_rewards
    assert {label: (each.count, each.mean) for label, each in found.items()} == {
        "copy": (1, 0.25),
        "sums": (2, 0.5),
    }
    again = window.next()
    assert again == Window(by_task=True)

from __future__ import annotations

import random

from ratchet.actors.credits import Credits


def take_all(credits: Credits) -> list[tuple[str, str]]:
    taken = []
    while (worker := credits.take()) is not None:
        taken.append(worker)
    return taken


def test_a_total_may_be_repeated_lost_and_reordered() -> None:
    credits = Credits()
    credits.grant("r0", "a", 2)
    credits.grant("r0", "a", 2)
    assert take_all(credits) == [("r0", "a")] * 2
    credits.grant("r0", "a", 5)  # 3 and 4 were lost
    credits.grant("r0", "a", 4)  # and 4 comes late
    assert take_all(credits) == [("r0", "a")] * 3


def test_a_worker_that_has_not_left_after_all_goes_on_with_its_count() -> None:
    credits = Credits()
    credits.grant("r0", "a", 3)
    assert credits.take() == ("r0", "a")
    credits.close("r0", "a")
    credits.grant("r0", "a", 4)
    assert take_all(credits) == []
    credits.reopen("r0", "a")
    assert take_all(credits) == [("r0", "a")] * 2
    credits.grant("r0", "a", 4)
    assert take_all(credits) == [("r0", "a")]


def test_a_worker_that_a_newer_life_has_replaced_stays_closed() -> None:
    credits = Credits()
    credits.grant("r0", "a", 3)
    credits.close("r0", "a")
    credits.grant("r0", "b", 1)
    credits.reopen("r0", "a")
    assert take_all(credits) == [("r0", "b")]


def test_the_worker_with_most_room_is_served_first() -> None:
    credits = Credits()
    credits.grant("r0", "a", 1)
    credits.grant("r1", "a", 3)
    names = [name for name, _ in take_all(credits)]
    assert names[0] == "r1"
    assert sorted(names) == ["r0", "r1", "r1", "r1"]


def test_a_new_life_starts_from_nothing() -> None:
    credits = Credits()
    credits.grant("r0", "a", 10)
    assert credits.take() == ("r0", "a")
    credits.grant("r0", "b", 2)
    assert take_all(credits) == [("r0", "b")] * 2


def test_a_worker_that_left_gets_nothing_and_its_successor_is_kept() -> None:
    credits = Credits()
    credits.grant("r0", "b", 1)
    credits.close("r0", "a")
    assert take_all(credits) == [("r0", "b")]
    credits.grant("r0", "b", 9)
    credits.close("r0", "b")
    assert credits.take() is None


def test_the_last_words_of_a_dead_worker_give_no_credit() -> None:
    credits = Credits()
    credits.grant("r0", "a", 3)
    credits.close("r0", "a")
    credits.grant("r0", "a", 9)  # read from its link after the news of its end
    assert credits.take() is None
    credits.grant("r0", "b", 2)
    credits.grant("r0", "a", 9)
    assert take_all(credits) == [("r0", "b")] * 2


def test_a_lapsed_lease_gives_its_credit_back_until_its_group_ends_after_all() -> None:
    credits = Credits()
    credits.grant("r0", "a", 2)
    assert take_all(credits) == [("r0", "a")] * 2
    credits.lapse("r0", "a", 0, 0)  # its message may have been lost with a link
    assert take_all(credits) == [("r0", "a")]
    credits.late("r0", "a", 1, 0)  # another group, which had come to its end before
    credits.late("r0", "a", 0, 1)
    assert credits.num_free == 0
    credits.late("r0", "a", 0, 0)  # it was not: its worker counts it as ended, and claims for it
    credits.grant("r0", "a", 3)
    assert take_all(credits) == []
    credits.late("r0", "a", 0, 0)  # once
    credits.grant("r0", "a", 4)
    assert take_all(credits) == [("r0", "a")]
    credits.lapse("r0", "b", 1, 0)  # another life
    credits.lapse("r1", "a", 1, 0)
    assert take_all(credits) == []


def test_whatever_happens_the_worker_with_most_room_is_served() -> None:
    rng = random.Random(7)
    credits = Credits()
    names = [f"r{i}" for i in range(12)]
    totals, free = (dict.fromkeys(names, 0) for _ in range(2))
    lapses, lapsed = 0, {name: list[int]() for name in names}
    for _ in range(20_000):
        name = rng.choice(names)
        what = rng.randrange(4)
        if what == 0:
            more = rng.randrange(3)
            totals[name] += more
            free[name] += more
            credits.grant(name, "a", totals[name])
        elif what == 1 and totals[name]:
            credits.lapse(name, "a", lapses, 0)
            lapsed[name].append(lapses)
            lapses += 1
            free[name] += 1
        elif what == 2 and lapsed[name]:
            credits.late(name, "a", lapsed[name].pop(), 0)
            free[name] -= 1
        elif what == 3:
            taken = credits.take()
            assert (taken is None) == (max(free.values()) <= 0)
            if taken is not None:
                assert free[taken[0]] == max(free.values())
                free[taken[0]] -= 1
    assert credits.num_free == sum(max(0, left) for left in free.values())
    assert len(credits._heaps.get(0, [])) <= 2 * len(names) + 16


def test_workers_are_served_by_the_version_that_they_hold() -> None:
    credits = Credits()
    credits.grant("r0", "a", 1, version=3)
    credits.grant("r1", "a", 5, version=2)
    assert credits.versions == [3, 2]
    assert credits.take(3) == ("r0", "a")
    assert credits.take(3) is None
    assert credits.take(2) == ("r1", "a")
    credits.grant("r1", "a", 5, version=4)  # the same total, from newer weights
    assert credits.take(2) is None
    credits.grant("r1", "a", 6, version=3)  # read late: an engine does not go back
    assert credits.take(3) is None
    assert [credits.take(4) for _ in range(6)] == [("r1", "a")] * 5 + [None]
    assert credits.versions == []


def test_what_workers_once_held_is_forgotten() -> None:
    credits = Credits()
    for version in range(100):
        for worker in range(50):
            credits.grant(f"r{worker}", "a", version + 1, version)
    assert credits.versions == [99]
    for worker in range(50):
        credits.close(f"r{worker}", "a")
    assert credits.versions == []
    credits.grant("r0", "b", 1, version=7)
    credits.grant("r0", "c", 1, version=8)  # a new life takes the name of the old one
    assert credits.versions == [8]

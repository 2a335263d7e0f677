"""What a status says of waits: the longest chain of them, and the sentence about it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.run_statuses import gone, role, run, silent, wait

from ratchet.observability.waits import Chain, explain, longest_chain, waits_of
from ratchet.status import LinkRow, RoleStatus, RunStatus

FULL = {"batch_groups": 4, "queue_groups": 1, "in_flight_groups": 3, "request_step": 8}
OF_STEP_8 = "the batch of step 8"
OTHERS = (role("registry"), role("rollout-0"))


def edges(chain: Chain) -> list[str]:
    return [f"{row.who}>{row.on}" for row in chain.waits]


@pytest.mark.parametrize(
    ("roles", "chain"),
    [
        ([], []),
        ([role("a", wait("a", "b")), role("b")], ["a>b"]),
        ([role("a", wait("a", "b")), role("b", wait("b", "c")), role("c")], ["a>b", "b>c"]),
        # the longest, not the oldest
        (
            [role("x", wait("x", "c", 99)), role("a", wait("a", "b")), role("b", wait("b", "c"))],
            ["a>b", "b>c"],
        ),
        # of equals the oldest
        ([role("a", wait("a", "b", 3)), role("x", wait("x", "b", 4))], ["x>b"]),
        # of equals the one that ends where something is wrong
        (
            [role("a", wait("a", "b", 9), wait("a", "c", 8)), role("b"), silent("c", 7)],
            ["a>c"],
        ),
        # over a kind to whoever of it waits
        (
            [role("a", wait("a", "rollout")), role("rollout-0", wait("rollout-0", "b"))],
            ["a>rollout", "rollout-0>b"],
        ),
        # one that has left waits no more
        ([role("a", wait("a", "b"), up=False, reason="killed")], []),
        # two waits of one on another count once, with the older one
        ([role("a", wait("a", "b", 5), wait("a", "b", 6, "Y"))], ["a>b"]),
    ],
)
def test_the_longest_chain(roles: list[RoleStatus], chain: list[str]) -> None:
    found = longest_chain(run(*roles))
    assert (edges(found), found.cycle) == (chain, False)


def test_a_cycle_is_the_chain_and_what_leads_into_it_is_not() -> None:
    roles = [
        role("a", wait("a", "b")),
        role("b", wait("b", "c")),
        role("c", wait("c", "d")),
        role("d", wait("d", "b")),
    ]
    found = longest_chain(run(*roles))
    assert found.cycle
    assert sorted(edges(found)) == ["b>c", "c>d", "d>b"]
    order = [row.who for row in found.waits]
    assert [row.on for row in found.waits] == [*order[1:], order[0]]


def test_a_wait_on_any_of_a_kind_is_no_deadlock() -> None:
    roles = [
        role("trainer-0", wait("trainer-0", "rollout")),
        role("rollout-0", wait("rollout-0", "trainer-0")),
        role("rollout-1"),
    ]
    assert not longest_chain(run(*roles)).cycle


def test_waits_that_need_not_have_been_together_make_no_chain_and_no_cycle() -> None:
    # b reported 3 s ago; since then its wait may have ended before that of a began
    young = [role("a", wait("a", "b", 1.0), age_s=0.5), role("b", wait("b", "a", 9.0), age_s=3.0)]
    assert edges(longest_chain(run(*young))) == ["b>a"]
    old = [role("a", wait("a", "b", 3.0), age_s=0.5), role("b", wait("b", "a", 9.0), age_s=3.0)]
    assert longest_chain(run(*old)).cycle


def test_what_a_silent_process_waits_for_holds_still() -> None:
    roles = [role("a", wait("a", "b", 2.0), age_s=0.5), silent("b", 9.0, wait("b", "c", 1.0))]
    assert edges(longest_chain(run(*roles))) == ["a>b", "b>c"]


def test_many_roles_that_all_wait_on_each_other_are_looked_at_in_no_time() -> None:
    names = [f"r{n}" for n in range(60)]
    roles = [role(a, *(wait(a, b) for b in names[n + 1 :])) for n, a in enumerate(names)]
    assert len(longest_chain(run(*roles)).waits) == 59


def test_waits_are_as_of_now_the_longest_first() -> None:
    roles = [role("a", wait("a", "b", 1.0, left_s=9.0), age_s=0.5), role("b", wait("b", "c", 3.0))]
    assert waits_of(run(*roles)) == (wait("b", "c", 3.0), wait("a", "b", 1.5, left_s=8.5))


def stalled(*rollouts: RoleStatus, **facts: Any) -> RunStatus:
    waits = wait("trainer-0", "buffer", 12.3, OF_STEP_8, 287.7)
    buffer = role("buffer", facts=FULL | facts)
    return run(role("registry"), buffer, role("trainer-0", waits), *rollouts)


HEAD = "trainer-0 waits 12.3 s on buffer for the batch of step 8; "
IDLE = "buffer responds and waits on nobody; it has 1 of 4 groups for it, and "
TAIL = "; trainer-0 gives up in 287.7 s"


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (
            stalled(role("rollout-0"), silent("rollout-1", 9.0)),
            HEAD + IDLE + "3 are in flight; rollout-1 has not responded for 9 s, though its"
            " process is there" + TAIL,
        ),
        (
            stalled(
                role("rollout-0"),
                silent("rollout-10", 9.0, connected=False),
                silent("rollout-1", 9.0),
            ),
            HEAD + IDLE + "3 are in flight; the process of rollout-10 cannot be reached, for 9 s;"
            " rollout-1 has not responded for 9 s, though its process is there" + TAIL,
        ),
        (
            stalled(gone("rollout-0", "the process of rollout-0 has ended"), in_flight_groups=0),
            HEAD + IDLE + "0 are in flight; no rollout is up; rollout-0 has left: the process of"
            " rollout-0 has ended" + TAIL,
        ),
        (
            stalled(role("rollout-0", facts={"version": None}), in_flight_groups=0),
            HEAD + IDLE + "0 are in flight; no rollout asks for prompts; rollout-0 holds no"
            " version" + TAIL,
        ),
        (
            stalled(
                role("rollout-0", facts={"version": 3}),
                in_flight_groups=0, credit_groups=4, withheld_groups=4,
            ),
            HEAD + IDLE + "0 are in flight; its room waits for the weights that are trained on what"
            " it had" + TAIL,
        ),
        (
            run(
                *OTHERS,
                silent("buffer", 4.0),
                role("trainer-0", wait("trainer-0", "buffer", 12.3, OF_STEP_8, 287.7)),
            ),
            HEAD + "buffer has not responded for 4 s, though its process is there" + TAIL,
        ),
        (
            run(
                *OTHERS,
                role("buffer"),
                role(
                    "trainer-0",
                    wait("trainer-0", "buffer", 12.3, OF_STEP_8, 287.7),
                    report={"links": (LinkRow("buffer", False, 0.0, 3, 0, "no route"),)},
                ),
            ),
            HEAD + "the link from trainer-0 to buffer is down: no route (3 messages wait); buffer"
            " responds and waits on nobody" + TAIL,
        ),
        (
            run(
                role("registry"),
                role("buffer"),
                role("trainer-0", wait("trainer-0", "rollout", 30.0, "the first engine", 270.0)),
            ),
            "trainer-0 waits 30.0 s on rollout for the first engine; no rollout is up; trainer-0"
            " gives up in 270.0 s",
        ),
        (
            run(
                role("registry"),
                role("buffer"),
                role("trainer-0", wait("trainer-0", "rollout", 30.0, "the first engine", 270.0)),
                role("rollout-0", up=False),
            ),
            "trainer-0 waits 30.0 s on rollout for the first engine; no rollout is up; rollout-0"
            " has started and not registered yet; trainer-0 gives up in 270.0 s",
        ),
        (
            run(
                *OTHERS[:1],
                role("buffer"),
                role("trainer-0", wait("trainer-0", "rollout-0", 8.0, "LoadWeights", 57.0)),
                role("rollout-0", facts={"version": 3, "loading": 4}),
            ),
            "trainer-0 waits 8.0 s on rollout-0 for LoadWeights; rollout-0 loads version 4;"
            " trainer-0 gives up in 57.0 s",
        ),
        (
            run(
                *OTHERS,
                role("buffer", wait("buffer", "trainer-0", 12.0, "Y", 18.0)),
                role("trainer-0", wait("trainer-0", "buffer", 12.3, "X", 17.7)),
            ),
            "deadlock: buffer waits 12.0 s on trainer-0 for Y; trainer-0 waits 12.3 s on buffer for"
            " X; trainer-0 gives up in 17.7 s",
        ),
        (
            run(*OTHERS, role("buffer"), role("trainer-0", wait("trainer-0", "nobody", 3.0))),
            "trainer-0 waits 3.0 s on nobody for X; nobody here is called nobody; trainer-0 gives"
            " up in 20.0 s",
        ),
        (
            run(
                *OTHERS,
                role("buffer", age_s=0.4),
                role("trainer-0", age_s=0.7, facts={"last_step_s": 0.5}),
            ),
            "4 roles respond, and none has waited for longer than 0.7 s; the last step of trainer-0"
            " was 1.2 s ago",
        ),
        (
            run(
                *OTHERS,
                role("buffer", report={"mailboxes": {"buffer": 500}}),
                role("trainer-0", report={"loop_lag_s": 2.5}),
                gone("rollout-9", "stopped"),
                gone("rollout-8", "killed"),
            ),
            "500 messages wait in buffer; the loop of trainer-0 was held up for 2.5 s; rollout-8"
            " has left: killed; 2 roles respond, and none has waited for longer than 0.0 s",
        ),
        (
            run(*OTHERS, end="failed", end_reason="no batch"),
            "the run has ended: failed (no batch)",
        ),
    ],
)  # fmt: skip
def test_the_sentence(status: RunStatus, sentence: str) -> None:
    assert explain(status) == sentence


def test_of_much_trouble_the_first_is_named_and_the_rest_counted() -> None:
    roles = (silent(f"rollout-{n}", 9.0) for n in range(10))
    text = explain(run(role("registry"), role("buffer"), role("trainer-0"), *roles))
    assert text.count("has not responded") == 3
    assert "and 7 more have trouble" in text

"""Links between the processes of a small world, as values: what is on its way to whom.

Between two processes there is a link per lane of the real session, first in, first out; between
links any order. A process dies between two events: what was on its way to it is lost, and of what
it had sent each receiver gets a beginning and then the end of the link, on which watches are told
and asks fail. What is sent to it is lost until the sender has heard of its end, also if it has
begun another life by then, and waits for the next life from then on: the promises of
`transport/mailbox/peer.py`.

A `View` is one process with all that is on its way to it. What may happen at a process depends on
its view alone; what happens changes that view, and has effects on others that depend on theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from tests.simulation.small_life import End, Parcel, Reaction, Received, Watch


class Event(NamedTuple):
    """Something that may happen; the same words mean the same in each replay."""

    kind: str
    """deliver | end | done | crash | restart"""
    process: str
    """where it happens"""
    sender: str = ""
    lane: int = 0
    what: str = ""


class Begins(NamedTuple):
    """The next life of a process is there."""

    name: str


Queue = tuple[tuple[int, Parcel], ...]
"""(life of the receiver that it is for, parcel), in order"""
Effect = Parcel | End | Begins


class View(NamedTuple):
    """One process, and what is on its way to it."""

    name: str
    number: int = -1
    """of its last life"""
    alive: bool = False
    local: int = 0
    """names the state inside, for whoever keeps a table of those"""
    before: int = 0
    """names what is left of the life before"""
    gates: tuple[str, ...] = ()
    links: tuple[tuple[tuple[str, int], Queue], ...] = ()
    """what is on each link, by (sender, lane)"""
    ends: tuple[End, ...] = ()
    """of links, that it has yet to hear of"""
    gone: tuple[End, ...] = ()
    """those that it has heard of, and whose next lives have not begun"""
    back: tuple[str, ...] = ()
    """who has begun another life, while it has yet to hear of the end of the last one"""


def enabled(view: View) -> Iterator[Event]:
    """List what may happen at a living process."""
    ends = _first_ends(view)
    for (sender, lane), queue in view.links:
        to, parcel = queue[0]
        end = ends.get(sender)  # of a life before that of the parcel?
        if view.alive and to == view.number and (end is None or end.number == parcel.life):
            yield Event("deliver", view.name, sender, lane)
    for end in ends.values():
        if not end.clean or not any(_is_of(end, one) for _, queue in view.links for one in queue):
            yield Event("end", view.name, end.name)
    for what in view.gates:
        yield Event("done", view.name, what=what)


class Step(NamedTuple):
    """A process has reacted."""

    local: int
    """names the state inside it now"""
    reaction: Reaction


class Processes(Protocol):
    """What is inside the processes."""

    def start(self, name: str, number: int) -> Step:
        """Begin a life."""

    def take(self, view: View, incoming: Received) -> Step:
        """Let a process react."""

    def kill(self, view: View) -> int:
        """End a process; return what is then inside it."""


class Move(NamedTuple):
    """Something has happened."""

    view: View
    """of the process where it did"""
    effects: list[tuple[str, Effect]]
    """on which other; "" means all of them"""
    problems: tuple[str, ...] = ()


def happen(view: View, event: Event, processes: Processes) -> Move:
    """Let an event happen."""
    if event.kind == "crash":
        end = End(view.name, view.number, False, "killed")
        return Move(_dead(view, processes.kill(view)), [("", end)])
    if event.kind == "restart":
        # nobody else is dead then
        view = view._replace(number=view.number + 1, alive=True, before=view.local)
        step = processes.start(view.name, view.number)
        move = reacted(view._replace(local=step.local), step.reaction)
        return move._replace(effects=[("", Begins(view.name)), *move.effects])
    view, incoming = _received(view, event)
    step = processes.take(view, incoming)
    return reacted(view._replace(local=step.local), step.reaction)


def _received(view: View, event: Event) -> tuple[View, Received]:
    """Take what an event brings off the links."""
    if event.kind == "done":
        return view, event.what
    if event.kind == "deliver":
        links = dict(view.links)
        (_, parcel), *rest = links[event.sender, event.lane]
        links[event.sender, event.lane] = tuple(rest)
        return view._replace(links=_sorted(links.items())), parcel
    end = _first_ends(view)[event.sender]
    left = ((key, tuple(one for one in queue if not _is_of(end, one))) for key, queue in view.links)
    return view._replace(
        links=_sorted(left),
        ends=tuple(one for one in view.ends if one is not end),
        gone=view.gone if end.name in view.back else (*view.gone, end),
        back=tuple(name for name in view.back if name != end.name),
    ), end


def reacted(view: View, reaction: Reaction) -> Move:
    """Send on what a process did."""
    effects: list[tuple[str, Effect]] = []
    view = view._replace(gates=reaction.gates)
    for output in reaction.outputs:
        if isinstance(output, Watch):
            pending = {end.name for end in view.ends}
            again = (end for end in view.gone if end.name == output.name not in pending)
            view = view._replace(ends=(*view.ends, *again))
        elif isinstance(output, End):
            view, effects = _dead(view, view.local), [*effects, ("", output)]
        elif all(end.name != output.receiver for end in view.ends):  # or it is lost
            effects.append((output.receiver, output))
    return Move(view, effects, reaction.problems)


def _dead(view: View, local: int) -> View:
    return View(view.name, view.number, local=local, before=view.before)


def hears(view: View, effect: Effect) -> View:
    """Return a process after something that another did."""
    if isinstance(effect, Begins):
        late = [end.name for end in view.ends if end.name == effect.name]
        gone = tuple(end for end in view.gone if end.name != effect.name)
        return view._replace(gone=gone, back=(*view.back, *late))
    if isinstance(effect, End):
        return view._replace(ends=(*view.ends, effect)) if view.alive else view
    to = view.number if view.alive else view.number + 1
    if effect.only not in (None, to):
        return view  # an answer to one who is dead
    key = effect.sender, effect.lane
    links = dict(view.links)
    links[key] = (*links.get(key, ()), (to, effect))
    return view._replace(links=_sorted(links.items()))


def _first_ends(view: View) -> dict[str, End]:
    return {end.name: end for end in reversed(view.ends)}


def _is_of(end: End, one: tuple[int, Parcel]) -> bool:
    return (one[1].sender, one[1].life) == (end.name, end.number)


def _sorted(
    links: Iterable[tuple[tuple[str, int], Queue]],
) -> tuple[tuple[tuple[str, int], Queue], ...]:
    return tuple(sorted((link for link in links if link[1]), key=lambda link: link[0]))

"""Which of the processes that bear a peer's name is the one to talk to.

Consumes the lives that come, each with the moment in which its connection was made, and the word of
the registry; waits for nothing. The registry's word on a life decides. As long as there is none,
the last that came is the newest, and who was replaced is let in no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

_MAX_KNOWN: Final = 64


class Lives:
    """Of one name, here.

    Args:
        is_newest: tells what the registry says of a life of it; None: not a word.
    """

    def __init__(self, is_newest: Callable[[str], bool | None]) -> None:
        self.present: str | None = None
        """the incarnation that came last"""
        self.came_at = 0.0
        """when the connection was made by which it came, on the loop's clock"""
        self._is_newest = is_newest
        self._replaced: deque[str] = deque(maxlen=_MAX_KNOWN)
        self._earlier: deque[str] = deque(maxlen=_MAX_KNOWN)
        """incarnations that had a session with this life of ours, before the present one"""

    @property
    def has_replaced(self) -> bool:
        """Whether there is one that is to be kept out."""
        return bool(self._replaced)

    def admits(self, life: str) -> bool:
        """Tell whether a life is not one that a newer one has replaced."""
        newest = self._is_newest(life)
        return life not in self._replaced if newest is None else newest

    def comes_late(self, life: str, made_at: float) -> bool:
        """Tell whether a life was replaced during its hello: the last bytes of a process may arrive
        after its end, and after the first of the next one. From then on it is kept out.
        """
        present = self.present
        if present in {None, life} or made_at >= self.came_at or self._is_newest(life):
            return False
        self._replaced.append(life)
        return True

    def comes_back(self, life: str) -> bool:
        """Tell whether a life was here before the present one, and let it in."""
        if life in self._replaced:
            self._replaced.remove(life)
            return True
        return life in self._earlier

    def come(self, life: str, made_at: float) -> bool:
        """Note who is there; return whether it takes the place of another one. That is let in no
        more, unless the registry has brought this one back: its word on the other is still to come.
        """
        before, self.present = self.present, life
        if before == life:
            return False
        self.came_at = made_at
        if before is None:
            return False
        if not self._is_newest(life):
            self._replaced.append(before)
        return True

    def had_session(self, life: str) -> None:
        """Note that a life that is not present any more had a session with this life of ours."""
        self._earlier.append(life)

    def begin_anew(self) -> None:
        """This life of ours is over: nobody has had a session with the next one."""
        self._earlier.clear()

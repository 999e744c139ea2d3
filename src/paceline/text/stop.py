"""Stop strings over a stream of text that comes in arbitrary pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.errors import InvalidRequest, quote

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1_024


def check_stops(stops: Sequence[str]) -> None:
    """Raises `InvalidRequest` for too many stop strings, an empty one or too long a one."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("stop", f"{len(stops)} strings are over the limit of {MAX_STOPS}")
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidRequest("stop", f"the string at index {index} is empty")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequest(
                "stop", f"{quote(stop[:20])}… has {len(stop)} characters, the limit is {MAX_STOP_CHARS}"
            )


@dataclass(frozen=True, slots=True)
class StopStep:
    """What one piece of text led to: text that is safe to show, and the stop string that it completed, if one."""

    text: str
    stop: str | None = None

    @property
    def stopped(self) -> bool:
        """True once a stop string is complete; everything after it is dropped."""
        return self.stop is not None


class StopMatcher:
    """Holds text back while it may be the start of a stop string; nothing of a stop string is ever let out.

    The stop string that is complete first wins, and the longest of those that end together; so the outcome does not
    depend on how the text is cut into pieces. A Knuth-Morris-Pratt automaton each, so the work is linear in the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises `InvalidRequest` as `check_stops` does."""
        check_stops(stops)
        # Longest first, which settles ties.
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopStep:
        """Takes the next piece. After a stop, anything is dropped and nothing comes out."""
        if self._stopped:
            return StopStep("")
        if not self._automata:
            return StopStep(text)
        pending = self._held + text
        for index in range(len(self._held), len(pending)):
            for automaton in self._automata:
                if automaton.advance(pending[index]):
                    return self._stop(pending[: index + 1], automaton.pattern)
        keep = max(automaton.matched for automaton in self._automata)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return StopStep(pending[:cut])

    def flush(self) -> str:
        """The text that was held back in vain, at the end of the stream; empty after a stop."""
        held, self._held = self._held, ""
        return held

    def _stop(self, pending: str, stop: str) -> StopStep:
        self._stopped = True
        self._held = ""
        return StopStep(pending.removesuffix(stop), stop)


class _Automaton:
    """How much of the pattern's start the text ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0  # in [0, len(pattern)]
        self._fallback = _borders(pattern)

    def advance(self, character: str) -> bool:
        """Takes one character; True where the pattern is complete. It is not called again after that."""
        while self.matched and self.pattern[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self.pattern[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders

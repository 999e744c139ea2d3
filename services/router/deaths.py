"""Who is to hear that a worker is lost, though no call of theirs to it is in flight.

A prefill worker that has answered a prompt may still be writing its last blocks. Were it to die then, the decode worker
alone would find out, by a silence of ten seconds; the router knows at once, from the connection.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import PacelineError
from paceline.types import WorkerKey

OnDeath = Callable[[PacelineError], None]


class Watch:
    """One listener's interest in one life of a worker: a handle, ended by `Deaths.end`, or by the death it tells of."""

    def __init__(self, key: WorkerKey, on_death: OnDeath) -> None:
        self.key = key
        self.on_death = on_death


class Deaths:
    """The watches, by the life of a worker that each is for."""

    def __init__(self) -> None:
        self._watches: dict[WorkerKey, set[Watch]] = {}

    def __len__(self) -> int:
        """Watches that have not ended."""
        return sum(map(len, self._watches.values()))

    def __contains__(self, key: WorkerKey) -> bool:
        """True while anyone watches that life."""
        return key in self._watches

    def watch(self, key: WorkerKey, on_death: OnDeath) -> Watch:
        """`on_death` is called once, with the reason, if that life is lost before the watch ends."""
        watch = Watch(key, on_death)
        self._watches.setdefault(key, set()).add(watch)
        return watch

    def tell(self, key: WorkerKey, error: PacelineError) -> int:
        """Tells everyone who watches that life; returns how many those were."""
        told = self._watches.pop(key, set())
        for watch in told:
            watch.on_death(error)
        return len(told)

    def end(self, watch: Watch) -> None:
        """Nothing is told any more. After the death that it told of there is nothing to end."""
        watches = self._watches.get(watch.key)
        if watches is not None:
            watches.discard(watch)
            if not watches:
                del self._watches[watch.key]

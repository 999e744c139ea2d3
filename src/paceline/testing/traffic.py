"""Requests without end against a router, each compared with the answer it must have: what goes on while tests kill.

::

    traffic = Traffic(cluster.address, streams=6)
    with traffic.flowing():
        cluster.kill("decode", 0, "engine")
    for outcome in traffic.take():
        ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from paceline.client import Client, Completion, Finish
from paceline.errors import PacelineError

REQUEST_S: Final = 60.0
"""Seconds after which a request of the traffic counts as hanging."""
MAX_TOKENS: Final = 40
_LENGTHS: Final = (20, 90, 170, 330, 500, 700)


@dataclass(frozen=True)
class Outcome:
    """How one request ended. Times are monotonic seconds."""

    began: float
    ended: float
    right: bool  # every token as it must be
    finish: Finish | None
    error: PacelineError | None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


class Traffic:
    """`streams` clients that each send one request after the other, `pause_s` apart.

    The cluster must be whole when this is made. The pauses leave a restarted process some of a small machine.
    """

    def __init__(self, address: str, *, streams: int = 4, pause_s: float = 0.05) -> None:
        self._address = address
        self._prompts = [[11 * place % 499 + 3 for place in range(length)] for length in _LENGTHS]
        with Client(address) as client:
            self._expected = [self._ask(client, prompt).token_ids for prompt in self._prompts]
        self._streams = streams
        self._pause_s = pause_s
        self._outcomes: list[Outcome] = []
        self._lock = threading.Lock()
        self._flows = threading.Event()

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Requests are sent inside; at the end, those under way have ended."""
        self._flows.set()
        threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(self._streams)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._flows.clear()
            for thread in threads:
                thread.join(2 * REQUEST_S)
        hanging = sum(thread.is_alive() for thread in threads)
        assert hanging == 0, f"{hanging} requests do not end"

    def take(self) -> list[Outcome]:
        """Removes and returns what has ended so far."""
        with self._lock:
            taken, self._outcomes = self._outcomes, []
        return taken

    def _run(self, number: int) -> None:
        with Client(self._address) as client:
            while self._flows.is_set():
                number = (number + 1) % len(self._prompts)
                outcome = self._one(client, number)
                with self._lock:
                    self._outcomes.append(outcome)
                time.sleep(self._pause_s)

    def _one(self, client: Client, number: int) -> Outcome:
        began = time.monotonic()
        try:
            answer = self._ask(client, self._prompts[number])
        except PacelineError as error:
            return Outcome(began, time.monotonic(), False, None, error)
        right = answer.token_ids == self._expected[number]
        return Outcome(began, time.monotonic(), right, answer.finish, None)

    def _ask(self, client: Client, prompt: list[int]) -> Completion:
        return client.complete(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, timeout=REQUEST_S)

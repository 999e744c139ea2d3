"""What became of one request: stamps of one clock, in seconds from the run's start, and what the server said of it."""

from __future__ import annotations

from itertools import pairwise

import msgspec

STOPPED = "STOPPED"
"""The error of a request that the run itself ended: its verdict was clear, or it was interrupted."""

STOPPED_MESSAGE = "the run was stopped"

SHORT_ANSWER = "SHORT_ANSWER"
"""The error of an answer that ended well and had other than the tokens that were asked for."""

BROKEN_STREAM = "BROKEN_STREAM"
"""The error of a stream in which tokens are missing or come twice, or that ends without a word."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a router's answer says of how it was served."""

    queued_s: float
    prefill_s: float
    first_token_s: float  # by the router's clock: from its receipt on
    bytes: int
    blocks: int
    held_blocks: int  # on the decode worker already
    transfer_s: float  # from the first part's arrival to the last part's: 0 for a single part
    parts: int
    attempts: int
    computed_on_decode: int  # prompt tokens
    prefill_worker: str | None
    decode_worker: str | None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `arrivals_s` are the moments of the messages that brought tokens, `tokens` how many each brought."""

    index: int
    scheduled_s: float | None  # None in a closed loop
    sent_s: float
    ended_s: float
    arrivals_s: list[float]
    tokens: list[int]
    input_tokens: int
    asked_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    error: str | None = None  # a reason
    message: str = ""
    served: Served | None = None

    @property
    def lateness_s(self) -> float | None:
        """How much later than planned it was sent: the generator's fault, not the server's."""
        return None if self.scheduled_s is None else self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from sending to the arrival of the first message with a token."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: between messages that follow each other, one for each message but the first.

        A message with several tokens counts once, as it does for whoever reads it; `tpot_s` is the mean by tokens.
        """
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: from the first message with a token to the last, over the tokens after the first."""
        if len(self.arrivals_s) < 2 or self.output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From sending to the end of the stream."""
        return self.ended_s - self.sent_s

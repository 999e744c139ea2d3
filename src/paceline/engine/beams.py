"""Beam search: the `beam_width` likeliest beginnings go on side by side, and the best finished ones are the answers.

It is pure: what each beam's next tokens may be comes in, and how the beams go on comes out. Whoever runs the beams,
on whatever blocks, does as it says.

The algorithm, its ends included, is that of transformers' `generate(num_beams=...)` (`GenerationMixin._beam_search`,
5.24): of the continuations of all beams, by the sum of their log-probabilities, those among the first `beam_width` that
end are finished, and the first `beam_width` that do not end go on. A finished one's score is its sum over its length
to the power of `length_penalty`; the best `beam_width` are kept. The search is over

- at `max_tokens`, where the first `beam_width` continuations are finished, whatever they are;
- with `early_stopping`, as soon as `beam_width` are finished;
- else once `beam_width` are finished, and the best beam, were it to end now, would be no better than the worst of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from paceline.types import FinishReason, SamplingParams, TokenLogprob


def proposing(sampling: SamplingParams, eos_token_ids: Collection[int]) -> SamplingParams:
    """The parameters of an engine request that proposes tokens to a beam search: `logprobs` says how many.

    It takes `beam_width` that go on and as many that end, or else all that end: so none of the beam's continuations is
    missed, whatever the others' are. What the answer reports beside each token is among them.
    """
    assert sampling.beam_width is not None, "a request without beams proposes nothing"
    ending = len(ending_ids(sampling, eos_token_ids))
    most = max(2 * sampling.beam_width, sampling.beam_width + ending, sampling.logprobs or 0)
    # What may end an answer, and when, is the search's to say.
    return msgspec.structs.replace(sampling, logprobs=most, min_tokens=0)


def ending_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end an answer."""
    return frozenset({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)})


@dataclass(frozen=True, slots=True)
class Beam:
    """A beginning of an answer."""

    tokens: tuple[TokenLogprob, ...] = ()
    logprob: float = 0.0  # the sum of its tokens', in nats


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer."""

    beam: Beam
    score: float  # its log-probability over its length to the power of `length_penalty`
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Move:
    """How a beam came about: from which of the beams before it, and by which token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Continuation:
    logprob: float
    parent: int
    rank: int  # among what the parent proposed

    @property
    def order(self) -> tuple[float, int, int]:
        """The best first; of equals the one whose parent was the better."""
        return (-self.logprob, self.parent, self.rank)


class BeamSearch:
    """One request's search. It starts from one beam, the prompt, of no tokens."""

    def __init__(self, sampling: SamplingParams, eos_token_ids: Collection[int]) -> None:
        assert sampling.beam_width is not None, "a search has a width"
        self.width = sampling.beam_width
        self.beams = [Beam()]
        """Those that go on, the best first; none once the search is over."""
        self.finished: list[Hypothesis] = []
        """The best finished ones, the best first; `width` at most."""
        self._sampling = sampling
        self._ending = ending_ids(sampling, eos_token_ids)
        self._length = 0  # tokens of every beam

    @property
    def over(self) -> bool:
        """True when `finished` has the answers."""
        return not self.beams

    def advance(self, proposals: Sequence[Sequence[TokenLogprob]]) -> list[Move]:
        """Takes a token further: `proposals` has each beam's likeliest next tokens, the best first.

        The moves that made the new beams, in their order; none when the search is over.
        """
        self._length += 1
        last = self._length == self._sampling.max_tokens
        live: list[_Continuation] = []
        place = 0
        for each in self._ranked(proposals):
            ends = self._ends(proposals[each.parent][each.rank])
            if ends and self._length <= self._sampling.min_tokens:
                continue
            if last or ends:
                if place < self.width:
                    self._finish(each, proposals, FinishReason.STOP if ends else FinishReason.LENGTH)
            elif len(live) < self.width:
                live.append(each)
            place += 1
            if place >= self.width and (last or len(live) == self.width):
                break
        self.beams = [self._grown(each, proposals) for each in live]
        if self._is_over():
            self.beams = []
            return []
        return [Move(each.parent, proposals[each.parent][each.rank].token_id) for each in live]

    def _ranked(self, proposals: Sequence[Sequence[TokenLogprob]]) -> list[_Continuation]:
        return sorted(
            (
                _Continuation(beam.logprob + proposal.logprob, parent, rank)
                for parent, (beam, of_beam) in enumerate(zip(self.beams, proposals, strict=True))
                for rank, proposal in enumerate(of_beam)
            ),
            key=lambda each: each.order,
        )

    def _ends(self, proposal: TokenLogprob) -> bool:
        return proposal.token_id in self._ending

    def _grown(self, each: _Continuation, proposals: Sequence[Sequence[TokenLogprob]]) -> Beam:
        chosen, reported = proposals[each.parent][each.rank], self._sampling.logprobs or 0
        top = tuple((other.token_id, other.logprob) for other in proposals[each.parent][:reported])
        token = TokenLogprob(chosen.token_id, chosen.logprob, top)
        return Beam((*self.beams[each.parent].tokens, token), each.logprob)

    def _finish(self, each: _Continuation, proposals: Sequence[Sequence[TokenLogprob]], reason: FinishReason) -> None:
        found = Hypothesis(self._grown(each, proposals), self._score(each.logprob), reason)
        self.finished = sorted([*self.finished, found], key=lambda one: -one.score)[: self.width]

    def _score(self, logprob: float) -> float:
        """Of an answer of the present length."""
        return float(logprob / self._length**self._sampling.length_penalty)

    def _is_over(self) -> bool:
        if not self.beams:
            return True
        if len(self.finished) < self.width:
            return False
        return self._sampling.early_stopping or self._score(self.beams[0].logprob) <= self.finished[-1].score

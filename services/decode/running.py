"""What the engine runs of live requests: their choices, from the prompt's last block to the last token.

A request of one choice is one request to the engine. Of several, their prompt is one, which ends with the first tokens,
and every choice that goes on is another, over shared blocks of the prompt. Of a beam search (`beams`) each beam is one,
and the choices are told when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from paceline.engine.beams import proposing
from paceline.engine.block_pool import BlockLease
from paceline.engine.engine import Engine
from paceline.engine.finish import finish_reason
from paceline.engine.request import Progress
from paceline.errors import EngineError
from paceline.services.decode.beams import LiveSearch
from paceline.services.decode.choices import engine_id
from paceline.services.decode.messages import ChoiceOver, DecodeEvent, EndChoice, NewTokens
from paceline.services.decode.request import LiveRequest
from paceline.services.decode.reservation_events import Cancel, Event, Finished, NonFinite
from paceline.types import FinishReason, RequestId, ReservationId, TokenLogprob


class RunningChoices:
    """The choices of `requests` before the engine.

    `tell` takes what the front is to hear, and `feed` what the reservations are.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Mapping[ReservationId, LiveRequest],
        eos_token_ids: Collection[int],
        *,
        tell: Callable[[DecodeEvent], None],
        feed: Callable[[Event], None],
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._eos_token_ids = eos_token_ids
        self._tell = tell
        self._feed = feed
        self._running: dict[RequestId, tuple[ReservationId, int]] = {}  # the choice that an engine request is

    def owner(self, request_id: RequestId) -> ReservationId | None:
        """The reservation that an engine request is of; None where it was ended."""
        running = self._running.get(request_id)
        return None if running is None else running[0]

    def progressed(self, done: Progress) -> None:
        """Passes new tokens on, and ends what the engine has ended."""
        reservation, choice = self._running[done.request_id]
        request = self._requests[reservation]
        if done.error is not None:
            if request.prompt_alone:
                self._engine.release(done.request_id)
            self._stopped(request, choice)
            request.error = done.error
            self._feed(NonFinite(reservation))
        elif request.search is not None:
            request.search.prompt_logprobs = request.search.prompt_logprobs or done.prompt_logprobs
            if done.token_ids:
                self._propose(reservation, request.search, done.request_id, done.logprobs)
        elif done.finishes:
            self._stopped(request, choice)
            lease = self._engine.take(done.request_id)
            self._start(reservation, lease, done.token_ids, done.logprobs, done.prompt_logprobs)
        else:
            if done.token_ids:
                self._tell_tokens(reservation, choice, done.token_ids, done.logprobs, done.prompt_logprobs)
            if done.ended:
                assert done.finish_reason is not None, "what is not cut has a reason"
                self._stopped(request, choice)
                self._choice_over(reservation, choice, done.finish_reason)

    def compute(self, reservation: ReservationId, lease: BlockLease) -> None:
        """Gives a request whose prompt is to be computed here to the engine."""
        request = self._requests[reservation]
        if request.sampling.beam_width is not None:
            self._search(reservation, lease)
        else:
            self._run(reservation, 0, lease, fanout=request.sampling.n)

    def landed(
        self,
        reservation: ReservationId,
        lease: BlockLease,
        first_tokens: Sequence[int],
        first_logprobs: tuple[TokenLogprob, ...],
    ) -> None:
        """Gives a request whose prompt has landed to the engine, with what the prefill worker sampled at its end.

        Raises EngineError, and leaves the lease to the caller, for what that can't have sampled.
        """
        request = self._requests[reservation]
        if request.sampling.beam_width is not None:
            self._search(reservation, lease, first_logprobs)
        elif request.sampling.n > 1:
            self._start(reservation, lease, first_tokens, first_logprobs)
        else:
            self._run(reservation, 0, lease, computed=len(request.prompt), output=first_tokens)
            self._tell_tokens(reservation, 0, first_tokens, first_logprobs)

    def end_choice(self, command: EndChoice) -> None:
        """Ends one of several choices, unless it is the last: that one ends with its request."""
        request = self._requests.get(command.reservation_id)
        if request is None or command.choice >= len(request.choices) or request.sampling.beam_width is not None:
            return  # of a search no answer is known before all are
        answer = request.choices[command.choice]
        others = any(each.finish is None for each in request.choices if each is not answer)
        if answer.finish is not None or not others:
            return
        if answer.running is not None and not request.prompt_alone:  # the prompt runs under the first one's name
            self._engine.abort(answer.running)
            self._stopped(request, command.choice)
        self._choice_over(command.reservation_id, command.choice, FinishReason.CANCELLED)

    def abort(self, request: LiveRequest) -> None:
        """Ends whatever the engine runs of the request."""
        for choice, answer in enumerate(request.choices):
            if answer.running is not None:
                self._engine.abort(answer.running)
                if request.prompt_alone:
                    self._engine.release(answer.running)
                self._stopped(request, choice)
        if request.search is not None and not request.search.over:
            request.search.abort()
            self._forget(request.search)

    def _run(
        self,
        reservation: ReservationId,
        choice: int,
        lease: BlockLease,
        *,
        computed: int = 0,
        output: Sequence[int] = (),
        fanout: int = 1,
    ) -> None:
        """Gives a choice, or with `fanout` the prompt of all of them, to the engine. Raises as `Engine.add` does."""
        request = self._requests[reservation]
        request_id = engine_id(reservation, choice, request.sampling.n)
        self._engine.add(
            request_id,
            request.prompt,
            request.sampling,
            lease=lease,
            computed=computed,
            output=output,
            priority=request.priority,
            root=request.root,
            choice=choice,
            hold=fanout > 1,
            stop_after=1 if fanout > 1 else None,
            fanout=fanout,
            counts=not request.counted,
        )
        request.counted = True
        request.choices[choice].running = request_id
        self._running[request_id] = (reservation, choice)

    def _start(
        self,
        reservation: ReservationId,
        lease: BlockLease,
        first_tokens: Sequence[int],
        logprobs: tuple[TokenLogprob, ...],
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """The prompt of several choices is computed, and their first tokens are known: those that go on share it."""
        request = self._requests[reservation]
        num_prompt = len(request.prompt)
        if len(first_tokens) != len(request.choices):
            raise EngineError(f"{len(first_tokens)} first tokens came for {len(request.choices)} choices")
        ends = [self._first_ends(request, token_id) for token_id in first_tokens]
        live = [c for c, end in enumerate(ends) if end is None and request.choices[c].finish is None]
        forks = {choice: self._engine.fork(lease, num_prompt) for choice in live[1:]}
        for choice in live:
            fork = forks.get(choice, lease)
            output = first_tokens[choice : choice + 1]
            self._run(reservation, choice, fork, computed=num_prompt if fork.blocks else 0, output=output)
        if not live:
            lease.release()
        for choice, token_id in enumerate(first_tokens):
            if request.choices[choice].finish is None:
                of_choice = logprobs[choice : choice + 1]
                self._tell_tokens(reservation, choice, (token_id,), of_choice, prompt_logprobs if choice == 0 else ())
        for choice, end in enumerate(ends):
            if end is not None and request.choices[choice].finish is None:
                self._choice_over(reservation, choice, end)

    def _search(
        self, reservation: ReservationId, lease: BlockLease, proposals: tuple[TokenLogprob, ...] | None = None
    ) -> None:
        """Begins a beam search with the prompt as its one beam; with `proposals`, its next tokens, it is computed."""
        request = self._requests[reservation]
        sampling = proposing(request.sampling, self._eos_token_ids)
        expected = min(sampling.logprobs or 0, self._engine.limits.vocab_size)
        if proposals is not None and len(proposals) != expected:
            raise EngineError(f"{len(proposals)} scored first tokens came for a beam search that goes by {expected}")
        search = LiveSearch(self._engine, reservation, request.sampling, self._eos_token_ids)
        prompt = search.names[0]
        self._engine.add(
            prompt,
            request.prompt,
            sampling,
            lease=lease,
            computed=0 if proposals is None else len(request.prompt),
            priority=request.priority,
            root=request.root,
            counts=not request.counted,
            proposes=True,
        )
        request.counted, request.search = True, search
        for name in search.names:
            self._running[name] = (reservation, 0)
        if proposals is not None:
            self._propose(reservation, search, prompt, proposals)

    def _propose(
        self, reservation: ReservationId, search: LiveSearch, name: RequestId, proposals: Sequence[TokenLogprob]
    ) -> None:
        search.propose(name, proposals)
        if not search.over:
            return
        request = self._requests[reservation]
        self._forget(search)
        answers = search.hypotheses[: request.sampling.n]
        if len(answers) < request.sampling.n:
            request.error = EngineError(f"the search found {len(answers)} answers, and {request.sampling.n} are wanted")
            self._feed(Cancel(reservation))
            return
        for choice, answer in enumerate(answers):
            tokens = answer.beam.tokens
            logprobs = () if request.sampling.logprobs is None else tokens
            scores = search.prompt_logprobs if choice == 0 else ()
            self._tell_tokens(reservation, choice, [token.token_id for token in tokens], logprobs, scores)
        for choice, answer in enumerate(answers):
            self._choice_over(reservation, choice, answer.reason)

    def _forget(self, search: LiveSearch) -> None:
        for name in search.names:
            del self._running[name]

    def _first_ends(self, request: LiveRequest, token_id: int) -> FinishReason | None:
        return finish_reason(
            token_id,
            num_prompt=len(request.prompt),
            num_output=1,
            sampling=request.sampling,
            eos_token_ids=self._eos_token_ids,
            context_tokens=self._engine.limits.context_tokens,
        )

    def _stopped(self, request: LiveRequest, choice: int) -> None:
        """The engine does not know the choice any more."""
        running, request.choices[choice].running = request.choices[choice].running, None
        if running is not None:
            del self._running[running]

    def _choice_over(self, reservation: ReservationId, choice: int, finish: FinishReason) -> None:
        request = self._requests[reservation]
        answer = request.choices[choice]
        answer.finish = finish
        if len(request.choices) > 1:
            self._tell(
                ChoiceOver(reservation_id=reservation, choice=choice, finish=finish, completion_tokens=answer.told)
            )
        if all(each.finish is not None for each in request.choices):
            request.finish = finish
            self._feed(Finished(reservation))

    def _tell_tokens(
        self,
        reservation: ReservationId,
        choice: int,
        ids: Sequence[int],
        logprobs: tuple[TokenLogprob, ...],
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        answer = self._requests[reservation].choices[choice]
        self._tell(
            NewTokens(
                reservation_id=reservation,
                ids=list(ids),
                index=answer.told,
                choice=choice,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        )
        answer.told += len(ids)

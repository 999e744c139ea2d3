"""Requests and their parts, validated once and free of torch: the engine, the wire and the router share them.

Everything here is frozen. Token ids are ints in [0, vocab_size); sizes are in tokens unless a name says otherwise.
"""

from __future__ import annotations

import enum
import functools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NewType

import msgspec

from paceline.errors import ExceedsPool, InvalidRequest, PromptTooLong

BLOCK_TOKENS = 16
"""Tokens in a KV block, everywhere. Part of the fingerprint."""

BANNED = -100.0
"""The logit bias that excludes its token, whatever the other logits are; the least that is accepted."""

MAX_BIASES = 1_024
"""Most ids in a request's logit_bias."""

MAX_CHOICES = 32
"""Most choices of one request."""

MAX_BEAMS = 32
"""Most beams of one request."""

MAX_LENGTH_PENALTY = 10.0
"""Greatest length_penalty, and as a negative number the least."""

MAX_LOGPROBS = 20
"""Most tokens whose log-probabilities are reported beside a chosen one's."""

GROWTH_BLOCKS = 4
"""Blocks for its answer's next tokens that a request is admitted with, and expects as it goes on."""

RequestId = NewType("RequestId", str)
ReservationId = NewType("ReservationId", str)


class Role(enum.Enum):
    """The tier of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(enum.Enum):
    """Why a request's generation ended."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the context window
    CANCELLED = "cancelled"
    ERROR = "error"


class WorkerKey(msgspec.Struct, frozen=True, order=True):
    """One life of one worker. `epoch` grows with each start of the same id: a restarted peer is never mistaken."""

    worker_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.epoch}"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens, under the names of the OpenAI API. Build through `validated`."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0  # of the most likely token's probability; 0: no limit
    seed: int = 0  # 64 bits; the router draws one where the caller gave none, so that P, D and a replay agree
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # before them nothing that would end the answer is chosen
    repetition_penalty: float = 1.0  # of tokens in prompt and output; 1: none
    presence_penalty: float = 0.0  # of tokens in the output
    frequency_penalty: float = 0.0  # of tokens in the output, for each time
    n: int = 1  # choices, each an answer of its own
    best_of: int | None = None  # choices of which the n of the highest mean log-probability are answered
    beam_width: int | None = None  # beams of a search, whose n best are answered; None: tokens are drawn
    length_penalty: float = 1.0  # a finished beam's log-probability is divided by its length to this power
    early_stopping: bool = False  # a search ends with its beam_width-th finished beam, whatever could become of others
    prompt_logprobs: int | None = None  # the same as `logprobs` for the prompt's tokens
    logprobs: int | None = None  # most likely tokens to report beside each chosen one; None: nothing is reported
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), each id once; BANNED excludes

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken and nothing is drawn."""
        return self.temperature == 0.0 or self.top_k == 1

    def validated(self, *, vocab_size: int) -> SamplingParams:
        """Itself, or `InvalidRequest` naming the field, the value and the limit."""
        if self.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"{self.max_tokens} is under the limit of 1")
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise InvalidRequest("temperature", f"{self.temperature} is not a number from 0 to 100")
        if not 0.0 < self.top_p <= 1.0:  # also false for NaN
            raise InvalidRequest("top_p", f"{self.top_p} is not in (0, 1]")
        if self.top_k < 0:
            raise InvalidRequest("top_k", f"{self.top_k} is negative; 0 means no limit")
        if not 0 <= self.seed < 2**64:
            raise InvalidRequest("seed", f"{self.seed} is not from 0 to {2**64 - 1}")
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size=vocab_size)
        self._check_shaping(vocab_size)
        self._check_beams(vocab_size)
        return self

    def _check_shaping(self, vocab_size: int) -> None:
        """The part of `validated` that concerns what changes logits."""
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest("logprobs", f"{self.logprobs} is not from 0 to {MAX_LOGPROBS}")
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest("prompt_logprobs", f"{self.prompt_logprobs} is not from 0 to {MAX_LOGPROBS}")
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidRequest("n", f"{self.n} is not from 1 to {MAX_CHOICES}")
        if self.best_of is not None and not self.n <= self.best_of <= MAX_CHOICES:
            raise InvalidRequest("best_of", f"{self.best_of} is not from n {self.n} to {MAX_CHOICES}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest("min_tokens", f"{self.min_tokens} is not from 0 to max_tokens {self.max_tokens}")
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequest("logit_bias", f"{len(self.logit_bias)} ids are over the limit of {MAX_BIASES}")
        check_token_ids("logit_bias", [token_id for token_id, _ in self.logit_bias], vocab_size=vocab_size)
        for token_id, bias in self.logit_bias:
            _check_range("logit_bias", bias, BANNED, -BANNED, f" for id {token_id}")
        banned = {token_id for token_id, bias in self.logit_bias if bias <= BANNED}
        if self.min_tokens:
            banned.update(self.stop_token_ids)
        if len(banned) >= vocab_size:
            raise InvalidRequest("logit_bias", f"all of the {vocab_size} tokens are excluded")

    def _check_beams(self, vocab_size: int) -> None:
        """The part of `validated` that concerns beam search, which draws nothing and goes by the model alone."""
        _check_range("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.beam_width is None:
            for field, given in (
                ("length_penalty", self.length_penalty != 1.0),
                ("early_stopping", self.early_stopping),
            ):
                if given:
                    raise InvalidRequest(
                        field, f"{getattr(self, field)} is for beam search alone, which wants beam_width"
                    )
            return
        if not self.n <= self.beam_width <= MAX_BEAMS:
            raise InvalidRequest("beam_width", f"{self.beam_width} is not from n {self.n} to {MAX_BEAMS}")
        if self.beam_width + len(self.stop_token_ids) > vocab_size:
            raise InvalidRequest(
                "beam_width",
                f"{self.beam_width} beams and {len(self.stop_token_ids)} stop_token_ids are more than the "
                f"{vocab_size} tokens of the vocabulary",
            )
        for field in _NOT_WITH_BEAMS:
            value, neutral = getattr(self, field), _NOT_WITH_BEAMS[field]
            if value != neutral:
                raise InvalidRequest(field, f"{value} cannot be had with beam_width, which takes {neutral} alone")


_NOT_WITH_BEAMS = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "best_of": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
}
"""What a beam search can't have, and the value that asks for nothing."""


def _check_range(field: str, value: float, least: float, most: float, where: str = "") -> None:
    if not least <= value <= most:  # also false for NaN
        raise InvalidRequest(field, f"{value}{where} is not a number from {least:g} to {most:g}")


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log-probability, in nats, by the model alone: before penalties, biases and temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability) of the most likely tokens, best first
    text: str | None = None  # the token's own, in a router's answers; None where it has no tokenizer
    top_texts: tuple[str, ...] = ()  # of `top`, likewise; empty where there is none


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request, as billed: prompt, of it found in a cache, and generated."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker can hold, as it enforces it, and what a step of it reads."""

    vocab_size: int
    context_tokens: int
    pool_blocks: int
    most_blocks: tuple[int | None, ...] = (None,)
    """Of each KV group, the most blocks that a request has at once; None: one for each 16 tokens."""
    batch_requests: int = 0  # in one step at most; 0: not told
    step_weight_bytes: int = 0  # of the weights, that a decode step reads once for all its requests; 0: not told
    block_bytes: int = 0  # of a block: 16 tokens' KV in one KV group; 0: not told
    windows: tuple[int | None, ...] = (None,)  # of each KV group, tokens whose KV a step reads of a request; None: all


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has done since its start."""

    busy_s: float = 0.0  # in which a step was awaited
    steps: int = 0
    prompt_tokens: int = 0  # computed here, each once
    generated_tokens: int = 0  # sampled here


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load at one moment; every reply carries it."""

    running: int = 0  # requests in the batch
    waiting: int = 0  # requests accepted, not yet in the batch
    pending_prompt_tokens: int = 0  # prompt tokens accepted and not yet computed
    total_blocks: int = 0
    free_blocks: int = 0  # free this moment
    committed_blocks: int = 0  # held, or expected by accepted requests for what they do next; quarantine included
    quarantined_blocks: int = 0
    kept_blocks: int = 0  # kept from new requests, for those in hand; a lone request may have them, unless it is all
    tick_age_ms: float = 0.0  # age of the engine loop's last tick
    work: Work = Work()

    @property
    def headroom_blocks(self) -> int:
        """Blocks that a new request may still commit to."""
        alone = self.committed_blocks == 0 and self.kept_blocks < self.total_blocks
        return max(0, self.total_blocks - self.committed_blocks - (0 if alone else self.kept_blocks))


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


def blocks_in_groups(num_tokens: int, most_blocks: Sequence[int | None]) -> int:
    """Blocks of all KV groups that hold `num_tokens` tokens, where a request has `most_blocks` of a group at once."""
    blocks = blocks_for(num_tokens)
    return sum(blocks if most is None else min(blocks, most) for most in most_blocks)


def blocks_to_admit(prompt_tokens: int, max_tokens: int, most_blocks: Sequence[int | None] = (None,)) -> int:
    """Blocks that a decode worker admits a request by: its prompt's, and a bounded part of its answer's.

    The last sampled token's KV is never stored.
    """
    most_tokens = (blocks_for(prompt_tokens) + GROWTH_BLOCKS) * BLOCK_TOKENS
    return blocks_in_groups(min(prompt_tokens + max_tokens - 1, most_tokens), most_blocks)


@functools.lru_cache(256)
def longest_request(limits: Limits) -> int:
    """Most tokens, prompt and answer, of a request that can be served within `limits`: see `check_lengths`."""
    stored = range(limits.context_tokens)
    return bisect_right(stored, limits.pool_blocks, key=lambda tokens: blocks_in_groups(tokens, limits.most_blocks))


def check_token_ids(field: str, token_ids: Sequence[int], *, vocab_size: int) -> None:
    """Raises `InvalidRequest` for the first id outside the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return  # at C's speed: prompts are long, and nearly all are valid
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(field, f"id {token_id} at index {index} is not in [0, {vocab_size})")


def check_prompt(token_ids: Sequence[int], *, max_tokens: int, limits: Limits) -> None:
    """Raises the fitting `InvalidRequest` for a prompt that can never be served within `limits`."""
    check_lengths(len(token_ids), max_tokens=max_tokens, limits=limits)
    # Last, since it alone takes time in the prompt's length, which is within the limits by now.
    check_token_ids("prompt", token_ids, vocab_size=limits.vocab_size)


def check_lengths(prompt_tokens: int, *, max_tokens: int, limits: Limits) -> None:
    """The part of `check_prompt` that needs the prompt's length alone.

    The last sampled token's KV is never stored, hence the -1.
    """
    if prompt_tokens < 1:
        raise InvalidRequest("prompt", "is empty: at least one token is needed")
    needed = prompt_tokens + max_tokens
    if needed > limits.context_tokens:
        raise PromptTooLong(
            "prompt",
            f"{prompt_tokens} prompt tokens + max_tokens {max_tokens} = {needed} "
            f"is over the context of {limits.context_tokens} tokens",
        )
    blocks = blocks_in_groups(needed - 1, limits.most_blocks)
    if blocks > limits.pool_blocks:
        raise ExceedsPool(
            "prompt",
            f"{prompt_tokens} prompt tokens + max_tokens {max_tokens} need {blocks} KV blocks "
            f"of {BLOCK_TOKENS} tokens, and the pool has {limits.pool_blocks}",
        )

"""The settings of `paceline bench`. They come from flags and from a file of one's own, never from the environment,
where a `PACELINE_SEED` that is meant for workers would change the load without a word."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from paceline.config import parse_address
from paceline.errors import ConfigError, quote
from paceline.settings import merge

DEFAULT_REQUESTS = 100


class Mode(enum.Enum):
    """Who decides when a request is sent."""

    OPEN = "open"  # a Poisson process: whether earlier ones have been answered does not matter
    CLOSED = "closed"  # so many users, each of whom waits for an answer before asking again
    TRACE = "trace"  # a file says when


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, where to, and how to judge it."""

    router: Annotated[str, Meta(description="Router to load, as host:port; $PACELINE_ROUTER where that is set")] = (
        "127.0.0.1:7070"
    )
    openai: Annotated[
        str | None, Meta(description="OpenAI-compatible server to load instead, as http://host:port/v1")
    ] = None
    model: Annotated[str | None, Meta(description="Model to ask for; none: the one served")] = None
    rate: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        Meta(description="Open loop: requests a second, at the moments of a Poisson process"),
    ] = None
    concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        Meta(description="Closed loop: requests under way at any moment; as many as --requests sends all at once"),
    ] = None
    trace: Annotated[Path | None, Meta(description="Replay: a JSONL or CSV file of moments and lengths")] = None
    trace_unit: Annotated[Literal["s", "ms"], Meta(description="Unit of the trace's numeric moments")] = "s"
    trace_speed: Annotated[float, Meta(description="Replays a trace this many times faster", gt=0, le=1e6)] = 1.0
    requests: Annotated[
        Annotated[int, Meta(ge=1, le=10_000_000)] | None,
        Meta(description="Requests to send, warm-up apart; none: 100, or all that duration_s or the trace have"),
    ] = None
    duration_s: Annotated[
        Annotated[float, Meta(gt=0, le=86_400)] | None,
        Meta(description="Seconds after which no request is sent any more"),
    ] = None
    warmup: Annotated[
        int, Meta(description="Requests before the clock starts, which are in no figure", ge=0, le=100_000)
    ] = 1
    input_len: Annotated[int, Meta(description="Tokens of a prompt", ge=1, le=10_000_000)] = 512
    output_len: Annotated[int, Meta(description="Tokens of an answer, whatever the model says", ge=1, le=1_000_000)] = (
        128
    )
    input_spread: Annotated[
        float, Meta(description="Prompts have input_len tokens, give or take this share of it, evenly", ge=0, lt=1)
    ] = 0.0
    output_spread: Annotated[
        float, Meta(description="Answers have output_len tokens, give or take this share of it, evenly", ge=0, lt=1)
    ] = 0.0
    shared_prefix: Annotated[
        float, Meta(description="Share of each prompt, from its start on, that all prompts have in common", ge=0, le=1)
    ] = 0.0
    seed: Annotated[int, Meta(description="Seed of moments, lengths and prompts", ge=0, le=2**63 - 1)] = 0
    temperature: Annotated[float, Meta(description="Temperature to ask for; 0 takes the likeliest token", ge=0)] = 0.0
    timeout_s: Annotated[float, Meta(description="Seconds after which a request has failed", gt=0, le=86_400)] = 600.0
    processes: Annotated[int, Meta(description="Processes that send and receive", ge=1, le=256)] = 1
    slo_ttft_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="Goodput: longest time to first token, in ms")
    ] = None
    slo_itl_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Goodput: longest p99 of a request's own inter-token latencies, in ms"),
    ] = None
    find_goodput: Annotated[
        bool, Meta(description="Search the highest rate at which goodput_share of all requests are good")
    ] = False
    goodput_share: Annotated[float, Meta(description="Share of requests that must be good", gt=0, le=1)] = 0.99
    goodput_tolerance: Annotated[
        float, Meta(description="The search ends when the rate is known to within this share", gt=0, le=1)
    ] = 0.05
    max_rate: Annotated[float, Meta(description="Highest rate that the search tries", gt=0, le=1e6)] = 1000.0
    vocab_size: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        Meta(description="Prompts' token ids are below this; none: as the router says. --openai needs it or tokenizer"),
    ] = None
    tokenizer: Annotated[
        str | None,
        Meta(description="Send text, made with the tokenizer of this model: for servers that take no token ids"),
    ] = None
    sample_s: Annotated[float, Meta(description="Seconds between looks at pools and queues", ge=0.05, le=60)] = 0.5
    json: Annotated[Path | None, Meta(description="Write everything measured to this file")] = None
    json_arrivals: Annotated[bool, Meta(description="Keep each arrival of each request in that file")] = False
    plots: Annotated[Path | None, Meta(description="Draw PNG files into this folder; needs paceline[bench]")] = None

    def __post_init__(self) -> None:
        """Raises ConfigError where two settings contradict each other, or one is missing."""
        parse_address("router", self.router)
        loops = [name for name in ("rate", "concurrency", "trace") if getattr(self, name) is not None]
        if self.find_goodput:
            if "rate" not in loops and loops:
                raise ConfigError(f"find_goodput: it searches a rate, which {loops[0]} leaves no room for")
            if self.slo is None:
                raise ConfigError("find_goodput: it needs slo_ttft_ms, slo_itl_ms or both to tell what is good")
        elif len(loops) != 1:
            given = f"{' and '.join(loops)} are" if loops else "none is"
            raise ConfigError(f"exactly one of rate, concurrency and trace must be given, and {given}")
        if self.openai is not None:
            if not self.openai.startswith(("http://", "https://")):
                raise ConfigError(f"openai: {quote(self.openai)} is not a URL such as http://127.0.0.1:8000/v1")
            if "@" in urlsplit(self.openai).netloc:  # and so it is not quoted here either
                raise ConfigError("openai: a URL with a user or a password is not taken, for tables and files show it")
            if self.vocab_size is None and self.tokenizer is None:
                raise ConfigError("openai: such servers do not say their vocabulary: give vocab_size or tokenizer")
        elif self.tokenizer is not None:
            raise ConfigError("tokenizer: it is for --openai; a router takes token ids")

    @property
    def mode(self) -> Mode:
        """Who decides when a request is sent."""
        if self.trace is not None:
            return Mode.TRACE
        return Mode.CLOSED if self.concurrency is not None else Mode.OPEN

    @property
    def slo(self) -> Slo | None:
        """What a good request keeps; None where nothing is asked of it."""
        if self.slo_ttft_ms is None and self.slo_itl_ms is None:
            return None
        return Slo(ttft_s=_seconds(self.slo_ttft_ms), itl_s=_seconds(self.slo_itl_ms))


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a good request, in seconds. None: any value is good."""

    ttft_s: float | None
    itl_s: float | None  # of the p99 of the request's own inter-token latencies


def load_bench(*, file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> BenchConfig:
    """The settings from flags over `file`. Of the environment it takes $PACELINE_ROUTER, as all clients do."""
    named = env.get("PACELINE_ROUTER", "").partition(",")[0].strip()  # workers may be given several
    taken = {"PACELINE_ROUTER": named} if named else {}
    sections = {"bench": BenchConfig}
    return merge(BenchConfig, section="bench", sections=sections, file=file, env=taken, flags=flags, defaults={})


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3

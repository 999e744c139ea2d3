"""Structured logs: one set-up per process, people-readable on a terminal and JSON lines elsewhere, always to stderr.

    configure("decode", "info", worker="decode-0")
    log = get_logger(__name__)
    with bound(request_id=request_id):
        log.info("reserved", blocks=12)

The rule: **no prompt or completion text and no token ids in a log, ever**, at any level. Log counts, ids and reasons.
A field whose name says that it holds text (`prompt`, `text`, `messages`, ...) is replaced by its length before it is
rendered, and tracebacks never show local variables. A library that never calls `configure` stays silent.

The event is a short constant phrase; what varies goes into fields. `request_id` is bound with `bound` where a request
enters, and follows it through every task that is started below.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

LEVELS: Final = ("debug", "info", "warning", "error")

_TEXT_FIELDS: Final = frozenset({"completion", "content", "messages", "prompt", "text", "token_ids", "tokens"})
_ROOT: Final = "paceline"

logging.getLogger(_ROOT).addHandler(logging.NullHandler())


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger under `paceline`; usable at import time, before `configure`."""
    full_name = name if name == _ROOT or name.startswith(f"{_ROOT}.") else f"{_ROOT}.{name}"
    logger: FilteringBoundLogger = structlog.wrap_logger(
        logging.getLogger(full_name),
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return logger


def bind(**fields: str | int) -> None:
    """Adds fields to every later event of this task, and of those that it starts. For the task of one request."""
    structlog.contextvars.bind_contextvars(**fields)


@contextmanager
def bound(**fields: str | int) -> Iterator[None]:
    """Adds fields, such as `request_id` and `worker`, to every event of this task and of those started inside."""
    with structlog.contextvars.bound_contextvars(**fields):
        yield


def configure(
    service: str,
    level: str = "info",
    json: bool | None = None,
    *,
    worker: str | None = None,
    stream: TextIO | None = None,
) -> None:
    """Sends the process's logs, the standard library's too, to `stream` (stderr). A later call replaces an earlier one.

    `json` None means: JSON unless the stream is a terminal. Other libraries speak from warning upwards, and one level
    more freely at `debug`. Raises ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    stream = sys.stderr if stream is None else stream
    as_json = not stream.isatty() if json is None else json
    static = {"service": service} if worker is None else {"service": service, "worker": worker}

    def add_static(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {**static, **event}

    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_shared(), structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                add_static,
                *_renderers(as_json, stream),
            ],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO if level == "debug" else logging.WARNING)
    logging.getLogger(_ROOT).setLevel(level.upper())
    logging.captureWarnings(True)


def _shared() -> list[Processor]:
    """What every event passes, from our loggers and from other libraries' alike."""
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        _withhold_text,
    ]


def _renderers(as_json: bool, stream: TextIO) -> list[Processor]:
    if as_json:
        return [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=repr),
        ]
    # The plain formatter: the default one shows local variables, which hold prompts.
    console = structlog.dev.ConsoleRenderer(
        colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=28
    )
    return [structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False), _shorten_for_people, console]


def _withhold_text(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name in _TEXT_FIELDS & event.keys():
        value: Any = event[name]
        if hasattr(value, "__len__"):
            event[name] = f"<withheld, length {len(value)}>"
    return event


def _shorten_for_people(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Milliseconds instead of microseconds, and no package prefix."""
    event["timestamp"] = event["timestamp"][:-3]
    event["logger"] = str(event.get("logger", "")).removeprefix(f"{_ROOT}.")
    return event

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("paceline")
    handlers, level, our_level = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)
    logging.captureWarnings(False)


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_stream_that_is_no_terminal_gets_json_lines_with_service_and_worker() -> None:
    stream = io.StringIO()
    log.configure("decode", worker="decode-0", stream=stream)
    log.get_logger("paceline.services.decode").info("reserved", blocks=12)
    [event] = events(stream)
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "reserved",
        "blocks": 12,
        "level": "info",
        "logger": "paceline.services.decode",
        "service": "decode",
        "worker": "decode-0",
    }


def test_a_terminal_gets_coloured_text() -> None:
    stream = Terminal()
    log.configure("router", stream=stream)
    log.get_logger("router").warning("queue is full", size=3)
    assert "queue is full" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_json_can_be_asked_for_on_a_terminal_and_text_off_it() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    log.configure("router", json=True, stream=terminal)
    log.get_logger("router").info("one")
    log.configure("router", json=False, stream=pipe)
    log.get_logger("router").info("two")
    assert [event["event"] for event in events(terminal)] == ["one"]
    assert "two" in pipe.getvalue()
    assert "\x1b[" not in pipe.getvalue()


def test_what_is_bound_reaches_every_event_inside_and_none_after() -> None:
    stream = io.StringIO()
    log.configure("router", stream=stream)
    logger = log.get_logger("router")
    with log.bound(request_id="r1"):
        logger.info("inside")
        logging.getLogger("grpc").warning("of another library")
    logger.info("after")
    assert [event.get("request_id") for event in events(stream)] == ["r1", "r1", None]


@pytest.mark.parametrize("name", ["prompt", "text", "messages", "token_ids"])
def test_prompt_text_and_token_ids_are_withheld(name: str) -> None:
    stream = io.StringIO()
    log.configure("router", "debug", stream=stream)
    value: Any = [71, 72] if name == "token_ids" else "secret"
    log.get_logger("router").debug("request", **{name: value})
    assert events(stream)[0][name] == f"<withheld, length {len(value)}>"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["json", "terminal"])
def test_a_traceback_shows_no_local_variable(stream: io.StringIO) -> None:
    log.configure("router", stream=stream)
    prompt = "".join(["se", "cret"])
    try:
        raise ValueError(len(prompt))
    except ValueError:
        log.get_logger("router").exception("failed")
    assert "ValueError: 6" in stream.getvalue()
    assert "secret" not in stream.getvalue()


def test_the_level_holds_for_ours_and_other_libraries_speak_from_warnings_on() -> None:
    stream = io.StringIO()
    log.configure("router", "info", stream=stream)
    log.get_logger("router").debug("too little")
    logging.getLogger("grpc").info("too chatty")
    log.get_logger("router").info("ours")
    logging.getLogger("grpc").warning("theirs")
    assert [event["event"] for event in events(stream)] == ["ours", "theirs"]


def test_warnings_become_events() -> None:
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        log.configure("router", stream=stream)
        warnings.warn("old ways", DeprecationWarning, stacklevel=1)
    logging.captureWarnings(False)
    [event] = events(stream)
    assert "old ways" in event["event"]


def test_a_second_set_up_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    log.configure("router", stream=first)
    log.configure("router", stream=second)
    log.get_logger("router").info("once")
    assert first.getvalue() == ""
    assert len(events(second)) == 1


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        log.configure("router", "loud")


def test_a_value_that_is_no_json_does_not_break_the_line() -> None:
    stream = io.StringIO()
    log.configure("router", stream=stream)
    log.get_logger("router").info("odd", value=object, name="x")
    assert "object" in events(stream)[0]["value"]

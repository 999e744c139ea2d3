"""Environment variables that look like settings and are none: misspelt, they leave a default as it is, silently."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Final

from paceline.config import SECTIONS
from paceline.log import get_logger
from paceline.settings import ENV_PREFIX, settings_of

_OTHERS: Final = frozenset({"PACELINE_CACHE"})
"""What compose.yaml reads itself, and may be exported for it."""

_NEARNESS: Final = 0.75

log = get_logger(__name__)


def unknown_variables(env: Mapping[str, str]) -> dict[str, str | None]:
    """The `PACELINE_` variables that set nothing, each with the variable that was probably meant, if one is close."""
    known = {setting.env for section in SECTIONS.values() for setting in settings_of(section).values()}
    unknown = sorted(name for name in env if name.startswith(ENV_PREFIX) and name not in known | _OTHERS)
    return {name: _nearest(name, sorted(known)) for name in unknown}


def _nearest(name: str, known: Sequence[str]) -> str | None:
    # Without the prefix, which makes any two of them much alike.
    names = {other.removeprefix(ENV_PREFIX): other for other in known}
    near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), names, 1, _NEARNESS)
    return names[near[0]] if near else None


def warn_of_unknown_variables(env: Mapping[str, str]) -> None:
    """Logs a warning for each of `unknown_variables`."""
    for name, meant in unknown_variables(env).items():
        hint = {} if meant is None else {"did_you_mean": meant}
        log.warning("environment variable sets nothing", variable=name, **hint)

"""How a wrong command line is answered: one line with what is wrong, and where help is."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from paceline.cli.output import print_error

_NEARNESS: Final = 0.7
_STATUS: Final = 2


class Parser(argparse.ArgumentParser):
    """A parser that refuses what it does not know itself: argparse leaves that to the outermost, under its name."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """The namespace, and nothing that was left over."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0])}")
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """Ends the process. Without argparse's usage: that of a command with many flags hides the message."""
        print_error(f"{message} (see {self.prog} --help)")
        self.exit(_STATUS)

    def _hint(self, argument: str) -> str:
        near = difflib.get_close_matches(argument.partition("=")[0], self._option_string_actions, 1, _NEARNESS)
        return f"; did you mean {near[0]}?" if near and argument.startswith("-") else ""

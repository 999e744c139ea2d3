"""What `paceline up` shows. On a terminal: a live list of what it waits for, under the roles' logs with their names.
Elsewhere: the roles' own JSON lines as they are. Standard output gets the one line that says where to go.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from paceline.cli.output import counted, stderr_console
from paceline.cli.supervisor import Died, Event, Failure, Started, describe_status
from paceline.errors import StartupError
from paceline.log import get_logger

_ERROR: Final = b"error: "
_COLOURS: Final = {"router": "cyan", "prefill": "green", "decode": "magenta"}

log = get_logger(__name__)


class Screen:
    """Use inside its `with` block. Nothing it writes to can break a cluster: a reader that went away is ignored."""

    def __init__(self, names: Sequence[str], *, terminal: bool, log_dir: Path | None = None) -> None:
        self._terminal = terminal
        self._log_dir = log_dir
        self._console: Console = stderr_console()
        self._width = max(map(len, names))
        self._pids: dict[str, int] = {}
        self._states: Mapping[str, bool] = dict.fromkeys(names, False)
        self._files: dict[str, IO[bytes]] = {}
        self._errors: set[bytes] = set()  # that roles ended with, as shown
        self._live = Live(console=self._console, transient=True, refresh_per_second=8) if terminal else None

    def __enter__(self) -> Screen:
        if self._log_dir is not None:
            try:
                self._log_dir.mkdir(parents=True, exist_ok=True)
                for name in self._states:
                    self._files[name] = (self._log_dir / f"{name}.log").open("ab", buffering=0)
            except OSError as error:
                raise StartupError(f"log folder {self._log_dir} cannot be written: {error.strerror}") from error
        if self._live is not None:
            self._live.start()
            self._refresh()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end_live()
        for file in self._files.values():
            file.close()

    def on_line(self, name: str, line: bytes) -> None:
        """A line of a role's log."""
        with contextlib.suppress(OSError):
            if name in self._files:
                self._files[name].write(line + b"\n")
            if self._is_known_error(line):
                return
            if self._terminal:
                self._print(name, Text.from_ansi(line.decode("utf-8", "replace")))
            else:
                sys.stderr.buffer.write(line + b"\n")
                sys.stderr.buffer.flush()

    def on_event(self, event: Event) -> None:
        """A role's process started or died."""
        if isinstance(event, Started):
            self._pids[event.name] = event.pid
        else:
            self._errors.clear()  # what its next life says is to be read again
        if not self._terminal:
            self._log_event(event)
        elif isinstance(event, Died):
            how = describe_status(event.status)
            self._print(event.name, Text(f"died ({how}), starts again in {event.restart_in_s:g} s", style="yellow"))
        self._refresh()

    def on_change(self, states: Mapping[str, bool]) -> None:
        """Who is ready by now."""
        self._states = states
        self._refresh()

    def ready(self, address: str, model: str, *, took_s: float) -> None:
        """The end of the start: a line on standard output; on a terminal how to try it, in a log an event."""
        self._end_live()
        workers = len(self._states) - 1
        if not self._terminal:
            tiers = Counter(name.partition("-")[0] for name in self._states)
            counts = {"prefill": tiers["prefill"], "decode": tiers["decode"]}
            log.info("ready", address=address, model=model, **counts, took_s=round(took_s, 1))
        with contextlib.suppress(OSError):
            print(
                f"Paceline is ready at {address} after {took_s:.1f} s: {model}, {counted(workers, 'worker')}",
                flush=True,
            )
            if self._terminal:
                router = "" if address == "127.0.0.1:7070" else f" --router {address}"
                print(f"  try    paceline chat{router} --stats 'Why do cyclists ride in a line?'")
                print(f"  see    paceline status{router}\n  stop   Ctrl-C", flush=True)

    def stopping(self, *, at_once: bool = False) -> None:
        """The first Ctrl-C or SIGTERM; the second one asks to stop `at_once`."""
        self._end_live()
        if self._terminal:
            self._console.print(
                Text("stopping at once" if at_once else "stopping; once more to stop at once", style="yellow")
            )
        else:
            log.info("stopping at once" if at_once else "stopping")

    def failed(self, failure: Failure) -> None:
        """Why everything was stopped: the role's last lines, then what happened in one line of red."""
        self._end_live()
        for line in failure.lines:
            if line.encode() in self._errors:
                continue
            self._console.print(Text(f"  {failure.name} | {line}", style="dim"))
        self._console.print(Text(f"error: {failure.describe()}", style="bold red"))

    def _is_known_error(self, line: bytes) -> bool:
        """True for the last word of a role which another one ended with: of one mistake all workers say the same."""
        if not line.startswith(_ERROR):
            return False
        known = line in self._errors
        self._errors.add(line)
        return known

    def _log_event(self, event: Event) -> None:
        if isinstance(event, Started):
            log.info("role started", role=event.name, pid=event.pid)
        else:
            log.warning("role died", role=event.name, status=event.status, restart_in_s=event.restart_in_s)

    def _print(self, name: str, line: Text) -> None:
        prefix = Text(f"{name:<{self._width}} | ", style=_COLOURS.get(name.partition("-")[0], "blue"))
        self._console.print(prefix + line)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(Group(*(self._line(name, ready) for name, ready in self._states.items())))

    def _line(self, name: str, ready: bool) -> Text | Spinner:
        label = f"{name:<{self._width}}  pid {self._pids.get(name, '-')}"
        if ready:
            return Text(f"✓ {label}  {'serving' if name == 'router' else 'registered'}", style="green")
        return Spinner("dots", f"{label}  starting")

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

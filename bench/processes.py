"""Processes of this machine as /proc shows them: who descends from whom, and the CPU time each has used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One process at one moment. `cpu_s` is its own user and system time, in seconds, without its children's."""

    pid: int
    parent: int
    cpu_s: float
    command: str

    @property
    def name(self) -> str:
        """What it is, in words of its command line that tell the roles apart."""
        words = [word for word in self.command.split("\0") if word and not word.startswith("-")]
        return " ".join(Path(word).name for word in words[:3])


def tree(root: int) -> list[Process]:
    """The process `root` and all that descend from it, by process id."""
    everyone = [process for entry in Path("/proc").iterdir() if entry.name.isdigit() and (process := _read(entry))]
    found = {root}
    grew = True
    while grew:
        more = {process.pid for process in everyone if process.parent in found} - found
        found |= more
        grew = bool(more)
    return sorted((process for process in everyone if process.pid in found), key=lambda process: process.pid)


def load_average() -> float:
    """Processes that ran or waited to, averaged over the last minute."""
    return os.getloadavg()[0]


def _read(entry: Path) -> Process | None:
    """None for a process that has ended meanwhile."""
    try:
        stat = (entry / "stat").read_text(errors="replace")
        command = (entry / "cmdline").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    parent, user, system = int(fields[1]), int(fields[11]), int(fields[12])
    return Process(int(entry.name), parent, (user + system) / TICKS_PER_SECOND, command)

"""Children that end with whoever started them, and take their own children along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.bound_process import bound_process
from paceline.cli.child import group_members
from paceline.testing.scrape import wait_for

TWO_THAT_SLEEP = ["/bin/sh", "-c", "sleep 1000 & wait"]


def ended(group: int) -> bool:
    return not group_members(group)


@pytest.mark.parametrize("status", [0, 7])
def test_the_status_and_the_output_are_the_commands_own(status: int) -> None:
    command = ["/bin/sh", "-c", f"echo said; echo complained >&2; exit {status}"]
    with bound_process(command, output=subprocess.PIPE, errors=subprocess.PIPE) as process:
        assert process.communicate(timeout=30) == (b"said\n", b"complained\n")
    assert process.returncode == status
    assert ended(process.pid)


def test_a_command_gets_its_arguments_as_they_are() -> None:
    arguments = ["two words", "$HOME", "'", "*"]
    command = [sys.executable, "-S", "-c", "import sys; print(sys.argv[1:], sys.stdin.read())", *arguments]
    with bound_process(command, output=subprocess.PIPE) as process:
        said, _ = process.communicate(timeout=30)
    assert said.decode().strip() == str(arguments)


def test_a_command_that_is_not_there_fails_as_in_a_shell(tmp_path: Path) -> None:
    with bound_process([str(tmp_path / "nothing")], errors=subprocess.PIPE) as process:
        process.communicate(timeout=30)
    assert process.returncode == 127


def test_what_runs_at_the_end_of_the_block_is_killed_with_its_own_children() -> None:
    with pytest.raises(subprocess.TimeoutExpired), bound_process(TWO_THAT_SLEEP, errors=subprocess.PIPE) as process:
        wait_for(lambda: len(group_members(process.pid)) == 4, "guard, its reader, the command and its child")
        process.communicate(timeout=0.01)
    wait_for(lambda: ended(process.pid), "the end of the group")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_whoever_started_it_is_killed(number: signal.Signals) -> None:
    program = (
        "import sys; from paceline.bound_process import bound_process\n"
        "with bound_process(sys.argv[1:]) as process: print(process.pid, flush=True); process.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", program, *TWO_THAT_SLEEP], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        wait_for(lambda: len(group_members(group)) == 4, "guard, its reader, the command and its child")
        os.kill(owner.pid, number)
    wait_for(lambda: ended(group), "the end of the group")


def test_another_child_of_the_same_process_does_not_keep_it_alive() -> None:
    with bound_process(TWO_THAT_SLEEP) as process:
        other = subprocess.Popen(["/bin/sleep", "1000"])
    try:
        wait_for(lambda: ended(process.pid), "the end of the group")
    finally:
        other.kill()
        other.wait()

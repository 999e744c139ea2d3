"""A child process that does not outlive this one, with whatever it starts itself.

A killed process cannot end its children. So the child runs under a guard, in a process group of their own: a shell that
reads a pipe whose other end is this process's. The pipe ends when this process does, however that comes, and then the
guard ends the group.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Final

_GUARD: Final = """
exec 3<&0
"$@" < /dev/null 3<&- & work=$!
(read -r _ <&3; kill -s KILL 0) & guard=$!
exec 2> /dev/null 3<&-
wait "$work"; status=$?
kill "$guard"
exit "$status"
"""


@contextmanager
def bound_process(
    command: Sequence[str],
    *,
    output: IO[bytes] | int | None = None,
    errors: IO[bytes] | int | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command that reads nothing, for as long as the block; `output` and `errors` as `Popen` takes them.

    What still runs at the end of the block is killed, and reaped. Raises OSError where there is no shell.
    """
    read_end, write_end = os.pipe()  # neither is inherited by other children
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", *command],
            stdin=read_end,
            stdout=output,
            stderr=errors,
            env=env,
            start_new_session=True,
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    with process:
        try:
            yield process
        finally:
            os.close(write_end)

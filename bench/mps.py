"""A GPU in parts: each process that computes on it has its share of the multiprocessors, by CUDA's MPS.

Without it the processes that share a GPU take turns at all of it. With it they compute side by side, each on so many
multiprocessors at most, whether or not the others have work. Memory bandwidth, cache and power stay common to all.
https://docs.nvidia.com/deploy/mps/
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

CONTROL = "nvidia-cuda-mps-control"
_STOP_S = 20.0


class Parts:
    """A daemon of its own for `parts` equal parts. `env` is for the processes that shall have one each.

    Raises FileNotFoundError where the driver brings no MPS, and CalledProcessError where it does not start.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-mps-")
        folder = Path(self._folder.name)
        places = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
        for place in places.values():
            Path(place).mkdir()
        self._daemon_env = {**os.environ, **places}
        # Rounded down: together they have no more than there is.
        self.env: Mapping[str, str] = {**places, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // parts)}

    def __enter__(self) -> Parts:
        if shutil.which(CONTROL) is None:
            raise FileNotFoundError(f"{CONTROL} is not on the PATH: the driver's MPS is needed to part a GPU")
        subprocess.run([CONTROL, "-d"], env=self._daemon_env, check=True, timeout=_STOP_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Raises nothing, so as not to hide what was raised before. A daemon waits for its last client to end, which may
        # be this very process: it has heard of the end by then.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([CONTROL], input=b"quit\n", env=self._daemon_env, check=False, timeout=_STOP_S)
        with contextlib.suppress(OSError):
            self._folder.cleanup()

"""The GPUs that a benchmark is to run on: asked for first of all, and missed in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

MISSING = 2
"""Exit status: the machine is to be changed, not the program."""


def require(*devices: str) -> None:
    """Ends the program where one of the devices is not there. `cpu` always is."""
    indices = [device.index or 0 for device in map(torch.device, devices) if device.type == "cuda"]
    found = torch.cuda.device_count()
    if indices and max(indices) >= found:
        wanted = sorted(set(devices) - {"cpu"})
        gpus = f"the GPU{'s' * (len(wanted) > 1)} {' and '.join(wanted)}"
        print(f"{Path(sys.argv[0]).name} needs {gpus}: torch {torch.__version__} finds {found} here", file=sys.stderr)
        raise SystemExit(MISSING)

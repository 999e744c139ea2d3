"""Compiles a tuner's candidates side by side, since that takes longer than timing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton.runtime.jit import JITFunction


def compile_all(calls: Sequence[Callable[[], object]], device: torch.device, threads: int) -> None:
    """Makes every call with its Triton kernels compiled and not launched.

    What fails to compile is said here, fails again where it is timed, and is skipped there.
    """
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, **options: Any) -> Any:
        return run(self, *args, **{**options, "warmup": True})

    def attempt(call: Callable[[], object]) -> None:
        try:
            with torch.cuda.device(device):
                call()
        except Exception as error:  # noqa: BLE001 - the compiler's and ptxas's errors have no common base
            print(f"  does not compile: {str(error)[:100]}")

    JITFunction.run = only_compile
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(attempt, calls))
    finally:
        JITFunction.run = run

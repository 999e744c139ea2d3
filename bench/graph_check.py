"""Whether a GPU's graphs compute what their kernels compute one by one: an 8B model's steps, by their logits.

    python bench/graph_check.py                     # the whole GPU
    python bench/graph_check.py --parts 6           # on a sixth of it, by MPS, beside a second process that does so

Steps of decodes, of prompts short and long, and of both are launched as they are served, each then computed again
kernel by kernel on the same inputs. Between rounds every shape computes NaN, so that whatever reads what it has not
written itself gives it away. `--overlap` lets kernels overlap in all graphs, those with a library's products too: see
docs/decisions/overlapping-kernels.md.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from gpus import require
from mps import Parts
from paceline import kernels
from paceline.checkpoint import read_config, resolve
from paceline.engine import weights
from paceline.engine.device import create_runner, open_device
from paceline.engine.engine import Engine
from paceline.engine.graph_runner import GraphRunner
from paceline.engine.step_shape import StepShape
from paceline.types import RequestId, SamplingParams
from report import Report

SPOILT = 1
"""The token whose embedding is NaN: no other prompt has it."""
WAVES: Sequence[Sequence[int]] = (
    *((1,), (16,), (100,), (128,), (1000,), (8000,)),
    *((128,) * requests for requests in (2, 5, 8, 33)),
    *((7, 300, 1500), (1,) * 60, (1,) * 100),
)
TINY_WAVES: Sequence[Sequence[int]] = ((1,), (20,), (9, 9, 9))
CLOSE = 0.02
"""Of the largest logit: one shape's kernels are the same either way, but a library may cut a product up otherwise."""


class Check:
    """An engine whose every step is computed twice."""

    def __init__(self, engine: Engine, runner: GraphRunner, outputs: int) -> None:
        self.runner = runner
        self.worst: dict[str, float] = {}  # by kind of shape, the largest difference, of the largest logit; inf: NaN
        self.steps = 0
        self._engine = engine
        self._outputs = outputs
        self._random = random.Random(0)
        self._names = 0

    def wave(self, lengths: Sequence[int], *, spoilt: bool = False) -> None:
        """Requests with prompts of these lengths, all at once, to their ends."""
        self.runner.compare = None if spoilt else self._compare
        for length in lengths:
            self._add(length, spoilt=spoilt)
        while self._engine.has_work:
            self._engine.step()

    def _compare(self, found: Tensor, expected: Tensor) -> None:
        assert self.runner.last_shape is not None
        difference = float((found - expected).abs().max() / expected.abs().max())
        worse = difference if difference == difference else float("inf")
        kind = _kind(self.runner.last_shape)
        self.worst[kind] = max(worse, self.worst.get(kind, 0.0))
        self.steps += 1

    def _add(self, length: int, *, spoilt: bool) -> None:
        engine = self._engine
        vocab = engine.limits.vocab_size
        prompt = [SPOILT] * length if spoilt else [self._random.randrange(SPOILT + 1, vocab) for _ in range(length)]
        lease = engine.try_reserve(length + self._outputs)
        assert lease is not None, "the pool is large enough"
        self._names += 1
        sampling = SamplingParams(max_tokens=self._outputs, temperature=0.0, ignore_eos=True)
        engine.add(RequestId(str(self._names)), prompt, sampling, lease=lease, root=None)


def _kind(shape: StepShape) -> str:
    if shape.decodes:
        return f"decodes, {'up to 64' if shape.tokens <= 64 else 'more'}"
    return f"prompts, {'up to 256' if shape.tokens <= 256 else 'more'} tokens"


def check(report: Report, args: argparse.Namespace) -> None:
    """Builds the engine and runs all waves, `args.rounds` times."""
    device = open_device(args.device)
    source = resolve(args.model, cache_dir=Path.home() / ".cache/paceline")
    config = msgspec.structs.replace(read_config(source), context_tokens=256 if args.quick else 9_000)
    loaded = weights.load(source, config, dtype=torch.float32 if args.quick else torch.bfloat16, device=device)
    budget, most = (32, 6) if args.quick else (1024, 256)
    if args.quick:
        runner = GraphRunner(config, loaded, num_blocks=64, token_budget=budget, max_requests=most)
    else:
        fraction = 0.4 if args.parts else args.fraction
        runner = create_runner(
            config, loaded, num_blocks=None, token_budget=budget, max_requests=most, fraction=fraction
        )
    blocks = runner.pool.shape[0]
    engine = Engine(
        config,
        loaded,
        num_blocks=blocks,
        token_budget=budget,
        max_requests=most,
        prefix_cache=False,
        runner=runner,
    )
    loaded.embed[SPOILT] = torch.nan
    checked = Check(engine, runner, outputs=4)
    for _ in range(args.rounds):
        for lengths in TINY_WAVES if args.quick else WAVES:
            checked.wave(lengths)
        for lengths in TINY_WAVES if args.quick else WAVES:
            checked.wave(lengths, spoilt=True)
    report.note("steps computed twice", checked.steps)
    for kind, worst in sorted(checked.worst.items()):
        report.at_most(f"{kind}: difference, of the largest logit", worst, CLOSE)


def main() -> int:
    """The exit code says whether all steps were computed alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parts", type=int, default=0, metavar="N", help="of the GPU, of which this has one")
    parser.add_argument("--fraction", type=float, default=0.9, help="of the GPU's memory")
    parser.add_argument("--overlap", action="store_true", help="let kernels overlap in all graphs")
    parser.add_argument("--quick", action="store_true", help="tiny, interpreted on a CPU, to try it")
    args = parser.parse_args()
    if args.quick:
        args.device, args.model = "cpu", "dummy:tiny"
    require(args.device)
    if args.overlap:
        GraphRunner._is_a_chain = lambda self, shape: True  # type: ignore[method-assign]
    report = Report("graph-check")
    with report, ExitStack() as stack:
        if args.parts:
            parts = stack.enter_context(Parts(args.parts))
            os.environ.update(parts.env)
            beside = [sys.executable, __file__, f"--device={args.device}", f"--model={args.model}", "--rounds=1000"]
            company = subprocess.Popen([*beside, "--fraction=0.4"], stdout=subprocess.DEVNULL)
            stack.callback(company.wait)
            stack.callback(company.kill)
        with kernels.forced(kernels.Backend.TRITON):
            check(report, args)
        if args.parts:
            report.equal("exit status of the process beside it", company.poll(), None)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

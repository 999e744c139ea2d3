"""The measurements of kernels and links that docs/performance.md takes from GPUs, in one command, each with its limit.

    python bench/gpu_suite.py [--out FOLDER]               # one GPU: attention over a full pool, sampling, sanitizer
    python bench/gpu_suite.py --suite links [--out FOLDER] # two GPUs: KV stored twice, transports, cuts of a copy
    TRITON_INTERPRET=1 python bench/gpu_suite.py --quick   # no GPU: tries the programs, tells nothing of speed

What each printed and its JSON lie in the folder, a summary in `summary.json` and `summary.md`, which grows as jobs end.
A job that fails, or is ended at its limit, does not keep the next from running.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from report import RESULTS, commit

BENCH: Final = Path(__file__).parent
SHOWN_LINES: Final = 60
"""Of what a job printed, in the summary: its last ones, where the tables are."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program of `bench/`, with the options that it takes. `{out}` in one is the folder for results."""

    name: str
    command: tuple[str, ...]
    seconds: float  # after which it is ended
    quick: tuple[str, ...] | None = None  # what it is given in place of its options to be tried; None: it needs a GPU


SUITES: Final = {
    "kernels": (
        Job("full_pool", ("full_pool.py", "--json", "{out}/full_pool.json"), 180, ("--quick",)),
        Job("sampling", ("time_sampling.py", "--json", "{out}/sampling.json"), 150, ("--quick",)),
        Job("sanitize", ("sanitize.py", "--results", "{out}", "--seconds", "150"), 240),
    ),
    "links": (
        Job("dual_write", ("dual_write.py", "--json", "{out}/dual_write.json"), 150, ("--quick",)),
        Job(
            "transfer_cuts",
            ("transfer.py", "--transports", "", "--programs", "16,32,64,132", "--results", "{out}/cuts"),
            200,
            ("--quick", "--transports", "", "--programs", "16", "--results", "{out}/cuts"),
        ),
        Job("transfer", ("transfer.py", "--results", "{out}"), 180, ("--quick", "--results", "{out}")),
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job went. `status` is its exit code; None: it was ended at its limit."""

    name: str
    command: str
    status: int | None
    seconds: float
    output: str

    @property
    def word(self) -> str:
        """For the summary."""
        if self.status is None:
            return "OUT OF TIME"
        return "ok" if self.status == 0 else f"FAILED ({self.status})"


def run(job: Job, out: Path, *, quick: bool) -> Outcome:
    """Runs a job to its end or its limit; what it prints goes to a file of its own as it comes."""
    program, *options = job.command
    arguments = [each.format(out=out) for each in ((job.quick or ()) if quick else options)]
    command = [sys.executable, str(BENCH / program), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_search_path()), "PYTHONUNBUFFERED": "1"}
    log = out / f"{job.name}.log"
    began = time.monotonic()
    with log.open("w") as printed:
        process = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        status: int | None
        try:
            status = process.wait(job.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.returncode is None:  # with all that it started, which is in no other group
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    taken = time.monotonic() - began
    return Outcome(job.name, " ".join(["python", f"bench/{program}", *arguments]), status, taken, log.read_text())


def _search_path() -> list[str]:
    return [str(BENCH.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]


def summary(outcomes: Sequence[Outcome]) -> str:
    """In Markdown: a table, and below it the end of what each job printed."""
    lines = ["| job | | seconds | command |", "|---|---|---|---|"]
    lines += [f"| {each.name} | {each.word} | {each.seconds:.0f} | `{each.command}` |" for each in outcomes]
    for each in outcomes:
        lines += ["", f"## {each.name}", "", "```", *each.output.splitlines()[-SHOWN_LINES:], "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Exit code: 0 if all jobs did what they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="kernels")
    parser.add_argument("--jobs", help="names of jobs, in place of all of the suite")
    parser.add_argument("--out", type=Path, help="folder for what is found; by default in bench/results")
    parser.add_argument("--quick", action="store_true", help="tiny sizes without a GPU, of the jobs that can")
    args = parser.parse_args()
    jobs = [job for job in SUITES[args.suite] if job.quick is not None or not args.quick]
    names = [job.name for job in jobs] if args.jobs is None else args.jobs.split(",")
    if unknown := set(names) - {job.name for job in jobs}:
        parser.error(f"no job is called {', '.join(sorted(unknown))}; there are {', '.join(job.name for job in jobs)}")
    out: Path = (args.out or RESULTS / f"gpu_{args.suite}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for job in [job for job in jobs if job.name in names]:
        print(f"{job.name}: at most {job.seconds:.0f} s", flush=True)
        outcomes.append(run(job, out, quick=args.quick))
        print(f"{job.name}: {outcomes[-1].word} after {outcomes[-1].seconds:.0f} s", flush=True)
        document = {"suite": args.suite, "commit": commit(), "jobs": [asdict(each) for each in outcomes]}
        (out / "summary.json").write_text(json.dumps(document, indent=1))
        (out / "summary.md").write_text(summary(outcomes))
    print(summary(outcomes))
    return 0 if outcomes and all(each.status == 0 for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

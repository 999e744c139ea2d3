"""Small cases of every kernel under compute-sanitizer: reads and writes out of bounds, and races in shared memory.

    python bench/sanitize.py [--families attention,linear] [--seconds 150]         # one GPU

Cases are those of `tests/contract/kernels`, few of each family, spread over its types and shapes. Every tensor is an
allocation of its own, or torch's allocator would hide what lies just past one. Families run side by side, for most of
the time is the compiler's. A family fails if the sanitizer finds an error, if a case fails, if one was not run, and if
it is not done in time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from report import Report

SUITE: Final = Path(__file__).parents[1] / "tests" / "contract" / "kernels"

Picks = Mapping[str, Mapping[str, int]]
"""By file and test: of how many cases."""
FAMILIES: Final[Mapping[str, Picks]] = {
    "attention": {
        "test_attention.py": {
            "test_attention_is_that_of_float64": 10,
            "test_the_number_of_splits_does_not_matter": 3,
            "test_requests_without_tokens_are_padding": 1,
        },
        "test_batch_invariance.py": {"test_attention_does_not_hang_on_where_a_chunk_begins": 1},
    },
    "cache": {
        "test_elementwise.py": {"test_blocks_are_copied_whole": 4, "test_a_row_that_is_padding_is_not_stored": 1},
        "test_scatter.py": {"test_blocks_arrive_bit_for_bit_and_no_other_block_changes": 6},
    },
    "norm": {
        "test_elementwise.py": {
            "test_rms_norm": 4,
            "test_rms_norm_with_residual": 4,
            "test_qk_norm_leaves_values": 4,
            "test_norms_of_rows_that_lie_apart": 1,
        }
    },
    "rope": {"test_elementwise.py": {"test_rotary_and_store": 6}},
    "activation": {"test_elementwise.py": {"test_gated_activations": 4, "test_nothing_to_do_is_no_error": 1}},
    "linear": {
        "test_linear.py": {
            "test_linear_is_that_of_float64": 8,
            "test_a_product_of_few_rows_is_that_of_float64": 4,
            "test_pieces_add_up": 2,
        },
        "test_batch_invariance.py": {"test_a_row_of_a_product_is_what_it_is_alone": 1},
    },
    "sampling": {
        "test_sampling.py": {
            "test_a_draw_is_the_winner_of_the_race": 8,
            "test_rows_of_every_kind_share_a_batch": 1,
            "test_unusable_rows_are_named_and_their_neighbours_are_not": 1,
            "test_a_row_draws_what_the_twin_draws": 2,
            "test_the_noise_is_the_twins_to_the_bit": 1,
        }
    },
    "step": {
        "test_step.py": {
            "test_tokens_are_laid_out_by_their_requests": 3,
            "test_requests_get_as_much_of_their_tables_as_they_reach": 2,
        }
    },
}
RACED: Final[Mapping[str, Picks]] = {
    "attention": {"test_attention.py": {"test_attention_is_that_of_float64": 2}},
    "norm": {"test_elementwise.py": {"test_rms_norm": 1, "test_qk_norm_leaves_values": 1}},
    "linear": {"test_linear.py": {"test_linear_is_that_of_float64": 2}},
    "sampling": {"test_sampling.py": {"test_a_draw_is_the_winner_of_the_race": 2}},
}
"""Those whose programs share memory. racecheck is the slower of the two tools."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a tool said of a family. `errors` None: it said nothing, for it was ended or never began."""

    passed: int
    errors: int | None
    tail: str  # of what was printed, for whoever must find out why


def find_sanitizer() -> str | None:
    """The path of compute-sanitizer: the one on PATH, else the newest toolkit's."""
    found = shutil.which("compute-sanitizer")
    if found is not None:
        return found
    folders = sorted(Path("/usr/local").glob("cuda*"), key=lambda folder: (len(folder.name), folder.name))
    places = [folder / part / "compute-sanitizer" for folder in folders for part in ("compute-sanitizer", "bin")]
    return next((str(place) for place in reversed(places) if place.is_file()), None)


def pick(case_ids: Sequence[str], picks: Picks) -> list[str]:
    """Of the cases that Triton computes, `file::test[case]`, as many of each test as are asked for, evenly spread."""
    chosen: list[str] = []
    for file, tests in picks.items():
        for test, count in tests.items():
            cases = [each for each in case_ids if each.split("[")[0] == f"{file}::{test}" and _is_tritons(each)]
            chosen += [cases[place * len(cases) // count] for place in range(min(count, len(cases)))]
    return list(dict.fromkeys(chosen))


def _is_tritons(case_id: str) -> bool:
    """Not the twin's or C's. Tests of Triton alone name no form."""
    return re.search(r"\[(twin|native)\b", case_id) is None


def missing(case_ids: Sequence[str], picks: Picks) -> list[str]:
    """Tests that have no case here: renamed, or in a file that cannot be imported."""
    return [
        f"{file}::{test}" for file, tests in picks.items() for test in tests if not pick(case_ids, {file: {test: 1}})
    ]


def sanitizer_errors(log: str) -> int | None:
    """What the summary of memcheck, or racecheck, counts; None without one."""
    found = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) error", log)
    return sum(int(memcheck or racecheck) for memcheck, racecheck in found) if found else None


def passed(output: str) -> int:
    """Cases that pytest's last line counts as passed; 0 where any other failed."""
    lines = [line for line in output.splitlines() if re.search(r"\bin [\d.]+s", line)]
    if not lines or re.search(r"\d+ (failed|error)", lines[-1]):
        return 0
    found = re.search(r"(\d+) passed", lines[-1])
    return int(found[1]) if found else 0


class Suite:
    """A copy of the kernels' tests, away from the settings of the checkout, which a bare machine has no plugins for."""

    def __init__(self, folder: Path, sanitizer: str | None) -> None:
        self._folder, self._sanitizer = folder / "kernels", sanitizer
        shutil.copytree(SUITE, self._folder, ignore=shutil.ignore_patterns("__pycache__"))
        self._pytest = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(self._folder), "-q"]
        self._pytest += ["-p", "no:cacheprovider", "-W", "ignore"]

    def collect(self) -> list[str]:
        """Every case, as `file::test[case]`."""
        command = [*self._pytest, "--collect-only", "--continue-on-collection-errors", "."]
        done = subprocess.run(
            command, cwd=self._folder, env=_environment(), capture_output=True, text=True, check=False, timeout=120
        )
        for line in done.stdout.splitlines():
            if line.startswith("E  "):
                print(f"cannot be collected: {line[1:].strip()}", flush=True)
        return [line for line in done.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]

    def run(self, tool: str, cases: Sequence[str], limit: float) -> Outcome:
        """Runs the cases in one process under the tool, or bare where there is no sanitizer, for at most so long."""
        log = self._folder / f"{tool}-{abs(hash(tuple(cases)))}.log"
        under = [] if self._sanitizer is None else [self._sanitizer, "--tool", tool, "--log-file", str(log)]
        # Calls that fail are torch's to ask about and tests' to notice. What the kernels do is what is looked at.
        under += ["--report-api-errors", "no"] if under and tool == "memcheck" else []
        try:
            done = subprocess.run(
                [*under, *self._pytest, *cases],
                cwd=self._folder,
                env=_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=limit,
            )
        except subprocess.TimeoutExpired as expired:
            return Outcome(0, None, f"not done after {limit:.0f} s\n{_text(expired.output)[-2000:]}")
        said = log.read_text(errors="replace") if log.exists() else ""
        return Outcome(passed(done.stdout), sanitizer_errors(said), f"{done.stdout[-2000:]}\n{said[-4000:]}")


def _environment() -> dict[str, str]:
    source = str(Path(__file__).parents[1] / "src")
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def check(report: Report, suite: Suite, families: Sequence[str], limit: float, processes: int) -> None:
    """Everything that was asked for, side by side, into the report."""
    case_ids = suite.collect()
    work: list[tuple[str, str, list[str]]] = []
    for tool, of in (("memcheck", FAMILIES), ("racecheck", RACED)):
        for family in [each for each in of if each in families]:
            if absent := missing(case_ids, of[family]):
                report.fail(f"{family}, {tool}", f"no case of {', '.join(absent)}")
            work.append((family, tool, pick(case_ids, of[family])))
    with ThreadPoolExecutor(processes) as pool:
        outcomes = list(pool.map(lambda each: suite.run(each[1], each[2], limit), [each for each in work if each[2]]))
    for (family, tool, cases), outcome in zip([each for each in work if each[2]], outcomes, strict=True):
        right = report.equal(f"{family}, {tool}: cases passed", outcome.passed, len(cases))
        if outcome.errors is None:
            right = False
            report.fail(f"{family}, {tool}", "no summary of the sanitizer")
        else:
            right &= report.at_most(f"{family}, {tool}: errors", outcome.errors, 0)
        if not right:
            print(f"--- {family}, {tool}\n{outcome.tail}", flush=True)


def main() -> int:
    """Exit code: 0 without any error, 1 with one, 2 where there is no compute-sanitizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--seconds", type=float, default=150, help="that a family may take under a tool")
    parser.add_argument("--processes", type=int, default=8, help="families at once")
    parser.add_argument("--results", type=Path, help="folder for the JSON, in place of bench/results")
    args = parser.parse_args()
    families = args.families.split(",")
    if unknown := sorted(set(families) - set(FAMILIES)):
        parser.error(f"no family is called {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is neither on PATH nor in /usr/local/cuda*", file=sys.stderr)
        return 2
    print(f"{sanitizer}", flush=True)
    report = Report("sanitize") if args.results is None else Report("sanitize", results=args.results)
    with report, tempfile.TemporaryDirectory() as folder:
        check(report, Suite(Path(folder), sanitizer), families, args.seconds, args.processes)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

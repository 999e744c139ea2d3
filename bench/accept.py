"""Acceptance checks: `make accept-NAME`, or `bench/accept.py NAME...` for several and `all` for every one.

A check is `bench/accept_<name>.py` with `def run(report: Report) -> None`. It puts each measured value beside its limit
into the report; it fails where one is past its limit, where it raises, and where it compared nothing.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from report import Report

HERE = Path(__file__).parent


def names() -> list[str]:
    """Every check there is, as `make accept-NAME` calls it."""
    return sorted(path.stem.removeprefix("accept_").replace("_", "-") for path in HERE.glob("accept_*.py"))


def accept(name: str) -> bool:
    """Runs one check to its end and prints its table; True if it passed."""
    report = Report(name)
    with report:
        importlib.import_module(f"accept_{name.replace('-', '_')}").run(report)
    return report.finish() == 0


def main(arguments: list[str]) -> int:
    """Exit code: 0 if all passed, 1 if one failed, 2 for a name that is no check."""
    wanted = names() if arguments == ["all"] else arguments
    unknown = sorted(set(wanted) - set(names()))
    if unknown or not wanted:
        print(
            f"no check is called {', '.join(unknown) or '(none was named)'}; there are: {', '.join(names())}",
            file=sys.stderr,
        )
        return 2
    failed = [name for name in wanted if not accept(name)]
    if len(wanted) > 1:
        print(
            f"{len(wanted) - len(failed)} of {len(wanted)} checks passed"
            + (f"; failed: {', '.join(failed)}" if failed else "")
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The wheel: built through an sdist, installed where the checkout is not, whole, and with no generic top-level name."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster import Cluster
from report import Report

ROOT = Path(__file__).parent.parent
FOREIGN = ("kernels", "services", "protos", "kvtransfer")

IMPORT_ALL = """
import importlib, pkgutil, paceline
names = [module.name for module in pkgutil.walk_packages(paceline.__path__, "paceline.")]
for name in names:
    # The helpers of tests need what development needs.
    if not name.endswith("__main__") and not name.startswith("paceline.testing."):
        importlib.import_module(name)
print(len(names))
"""

ROUTER_WITHOUT_TORCH = """
import importlib, pkgutil, sys, paceline.client, paceline.services.router as router
for module in pkgutil.walk_packages(router.__path__, "paceline.services.router."):
    importlib.import_module(module.name)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "nixl", "zmq"}))
"""


def run(report: Report) -> None:
    """Builds, installs and uses the wheel in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="paceline-wheel-") as folder:
        place = Path(folder)
        command(sys.executable, "-m", "build", "--outdir", place / "dist", ROOT, cwd=place)
        [wheel], [sdist] = place.glob("dist/*.whl"), place.glob("dist/*.tar.gz")
        report.note("built through", sdist.name)
        report.note("wheel", wheel.stat().st_size / 1e6, "MB")

        command(sys.executable, "-m", "venv", place / "venv", cwd=place)
        python = place / "venv" / "bin" / "python"
        constraints = ROOT / "constraints.txt"
        [torch] = [line for line in constraints.read_text().splitlines() if line.startswith("torch==")]
        command(python, "-m", "pip", "install", "--quiet", "-c", constraints, torch, cwd=place)
        command(python, "-m", "pip", "install", "--quiet", "-c", constraints, f"{wheel}[worker]", cwd=place)

        check_contents(report, python, place)
        check_use(report, python, place)


def check_contents(report: Report, python: Path, place: Path) -> None:
    """Every file of the checkout is there, every module imports, and nothing else came along."""
    where = command(python, "-c", "import paceline; print(paceline.__path__[0])", cwd=place)
    report.equal("imported from the checkout", where.startswith(str(ROOT)), False)
    missing = sorted(files_under(ROOT / "src" / "paceline") - files_under(Path(where)))
    report.equal("files missing in the wheel", missing, [])
    modules = int(command(python, "-W", "error::ImportWarning", "-c", IMPORT_ALL, cwd=place))
    report.at_least("modules that import", modules, len(modules_under(ROOT / "src" / "paceline")))
    report.equal(
        "torch and the like that the router imports", command(python, "-c", ROUTER_WITHOUT_TORCH, cwd=place), "[]"
    )
    for name in FOREIGN:
        found = command(python, "-c", f"import importlib.util as u; print(u.find_spec({name!r}))", cwd=place)
        report.equal(f"import {name}", found, "None")


def check_use(report: Report, python: Path, place: Path) -> None:
    """`paceline up` and `paceline generate`, from the wheel alone."""
    paceline = python.parent / "paceline"
    with Cluster(paceline=paceline, cwd=place, env=clean_environment()) as cluster:
        report.note("paceline up is ready after", cluster.ready_after_s, "s")
        prompt = "The capital of France is"
        options = (f"--router={cluster.router}", "--max-tokens=8", "--temperature=0")
        answer = command(paceline, "generate", *options, prompt, cwd=place)
        report.note("paceline generate answers", answer)
        report.contains("paceline generate names the capital", answer, "Paris")
        with cluster.client() as client:
            finish = client.complete(prompt, max_tokens=8, temperature=0.0).finish
        report.equal("prompt computed on a prefill worker", finish.prefill_worker is not None, True)
        report.note("paceline up stops after", cluster.stop(), "s")


def files_under(package: Path) -> set[str]:
    """Files of the package that are source, links followed, relative to it."""
    return {
        str(path.relative_to(package))
        for folder, _, names in os.walk(package, followlinks=True)
        for path in (Path(folder, name) for name in names)
        if "__pycache__" not in path.parts
    }


def modules_under(package: Path) -> set[str]:
    """Modules and packages below `package`."""
    return {name for name in files_under(package) if name.endswith(".py") and name != "__init__.py"}


def command(*line: str | Path, cwd: Path) -> str:
    """What a command prints, in an environment that does not know the checkout. Raises with its output."""
    done = subprocess.run(
        [str(part) for part in line], cwd=cwd, env=clean_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(map(str, line))[:200]} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout.strip()


def clean_environment() -> dict[str, str]:
    """This process's environment without what would lead Python back to the checkout."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}

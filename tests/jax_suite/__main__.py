"""jax's own tests under `moe_jit`: what passes with `jax.jit` passes with `moe_jit`.

    python -m tests.jax_suite CHECKOUT [FILE ...] [--workers N] [--limit SECONDS] [--cases N] [--select EXPRESSION]

Run from the root of the repository.  CHECKOUT is a checkout of jax at the version installed; FILEs are names in its
`tests`, by default those of `files.DEFAULT`.  Each file runs twice, each time in a process of its own: with jax's jit,
and with `moe_jit` in its place (see `plugin`).  Printed are the tests that pass with jit and do not with `moe_jit`; the
exit status is 1 if one of them is not among the known differences of `files`, or if nothing went through `moe_jit`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

from .files import DEFAULT, reason_for

ROOT = pathlib.Path(__file__).parents[2]
KINDS = ("jit", "moe_jit")
COUNTS = ("made", "called", "traced", "layers")
HUNG = "did not end: the process crashed, or the time limit of its file came"


@dataclasses.dataclass(frozen=True)
class Run:
    """One file under one jit: what is known of its tests; `error` says why nothing is."""

    outcomes: dict[str, str]
    errors: dict[str, str]
    counts: dict[str, int]
    seconds: float
    error: str | None

    @property
    def passed(self) -> set[str]:
        """Names of the tests that passed."""
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Where jax's tests are, and how long and how thoroughly they run."""

    checkout: pathlib.Path
    results: pathlib.Path
    limit: int
    cases: int
    select: str
    reuse: bool


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("files", nargs="*", default=DEFAULT)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, default=900, help="seconds a file may take under one jit")
    parser.add_argument("--cases", type=int, default=2, help="how many cases jax draws of each sampled test")
    parser.add_argument("--select", default="", help="an expression as of pytest -k")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "build" / "jax_suite")
    parser.add_argument("--reuse", action="store_true", help="use the results of plain jit that an earlier run left")
    options = vars(parser.parse_args(arguments))
    files, workers = options.pop("files"), options.pop("workers")
    settings = Settings(**options)
    settings.results.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        pending = {file: [pool.submit(run_file, file, kind, settings) for kind in KINDS] for file in files}
        judged = [judge(file, *(future.result() for future in runs)) for file, runs in pending.items()]
    print_totals(judged)
    return exit_status(judged)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A file under both: how many passed, and what differs, by test: reason if it is known, and error."""

    file: str
    jit: Run
    moe_jit: Run
    known: dict[str, str]
    unknown: dict[str, str]


def run_file(file: str, kind: str, settings: Settings) -> Run:
    """Runs the tests of a file in a process of its own."""
    path = settings.results / f"{file}.{kind}.jsonl"
    if settings.reuse and kind == "jit" and path.exists():
        return read_run(path, 0.0, None)
    path.unlink(missing_ok=True)
    start, log = time.perf_counter(), path.with_suffix(".log")
    with open(log, "w") as output:
        try:
            subprocess.run(
                command(file, kind, path, settings),
                cwd=ROOT,
                env=environment(settings),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=settings.limit,
            )
        except subprocess.TimeoutExpired:
            pass  # what has been written until now counts
    return read_run(path, time.perf_counter() - start, None if path.exists() else f"nothing ran: see {log}")


def command(file: str, kind: str, outcomes: pathlib.Path, settings: Settings) -> list[str]:
    """The pytest that runs a file of jax's tests with jax's own settings."""
    checkout = settings.checkout.resolve()
    config, plugin = checkout / "pyproject.toml", f"{__package__}.plugin"
    selected = ["-k", settings.select] if settings.select else []
    jit = [f"--jit={kind}", f"--outcomes={outcomes.resolve()}"]
    # Some tests capture what is printed themselves.
    quiet = ["-q", "-p", "no:cacheprovider", "--tb=short", "--capture=no"]
    pytest = [sys.executable, "-m", "pytest", "-p", plugin, "-c", str(config), f"--rootdir={checkout}"]
    return [*pytest, *jit, *quiet, *selected, str(checkout / "tests" / file)]


def environment(settings: Settings) -> dict[str, str]:
    """The environment of the tests: on the CPU, a few cases of each sampled test, none of the slow ones."""
    own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_GENERATED_CASES": str(settings.cases), "JAX_SKIP_SLOW_TESTS": "1"}
    return {**os.environ, **own}


def read_run(path: pathlib.Path, seconds: float, error: str | None) -> Run:
    """What the plugin wrote; a test that was started and has no verdict did not end."""
    outcomes: dict[str, str] = {}
    errors: dict[str, str] = {}
    counts: dict[str, int] = {}
    for entry in _entries(path):
        if "started" in entry:
            outcomes[entry["started"]], errors[entry["started"]] = "failed", HUNG
        elif "test" in entry:
            outcomes[entry["test"]], errors[entry["test"]] = entry["outcome"], entry["error"] or ""
        else:
            counts = entry["counts"]
    return Run(outcomes, errors, counts, seconds, error)


def _entries(path: pathlib.Path) -> Iterable[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return (json.loads(line) for line in lines if line.endswith("\n"))


def judge(file: str, jit: Run, moe_jit: Run) -> Judgement:
    """Compares the tests that came to an end under jit and were reached under `moe_jit`; prints the file's lines."""
    differing = sorted(jit.passed & set(moe_jit.outcomes) - moe_jit.passed)
    reasons = {test: reason_for(test) for test in differing}
    known = {test: reason for test, reason in reasons.items() if reason}
    unknown = {test: moe_jit.errors[test] for test, reason in reasons.items() if not reason}
    judgement = Judgement(file, jit, moe_jit, known, unknown)
    print(row(judgement), flush=True)
    for test, error in unknown.items():
        print(f"    {short(test)}: {error[:200]}", flush=True)
    return judgement


def row(judged: Judgement) -> str:
    """One line of the table, as Markdown."""
    jit, moe_jit = judged.jit, judged.moe_jit
    unreached = len(jit.passed - set(moe_jit.outcomes))
    counts = " / ".join(str(moe_jit.counts.get(name, 0)) for name in COUNTS)
    seconds = f"{jit.seconds:.0f} / {moe_jit.seconds:.0f} s"
    notes = "; ".join(filter(None, (jit.error, moe_jit.error, f"{unreached} not reached" if unreached else "")))
    cells = (judged.file, len(jit.passed), len(moe_jit.passed), len(judged.known), len(judged.unknown), counts, seconds)
    return "| " + " | ".join(map(str, cells)) + f" | {notes} |"


def short(test: str) -> str:
    """A test by class and name."""
    return test.partition("::")[2]


def print_totals(judged: list[Judgement]) -> None:
    """Sums over all files, and the known differences with their reasons."""
    counts = {name: sum(j.moe_jit.counts.get(name, 0) for j in judged) for name in COUNTS}
    for judgement in judged:
        for test, reason in judgement.known.items():
            print(f"known: {short(test)}: {reason}")
    passed = {kind: sum(len(getattr(j, kind).passed) for j in judged) for kind in KINDS}
    print(f"passed with jit: {passed['jit']}, with moe_jit: {passed['moe_jit']}")
    print(f"known differences: {sum(len(j.known) for j in judged)}, others: {sum(len(j.unknown) for j in judged)}")
    print("moe_jit: " + ", ".join(f"{name} {number}" for name, number in counts.items()))


def exit_status(judged: list[Judgement]) -> int:
    """1 if a difference is unknown, a file did not run, or no program went through the passes."""
    traced = sum(j.moe_jit.counts.get("traced", 0) for j in judged)
    broken = any(j.unknown or j.jit.error or j.moe_jit.error for j in judged)
    return int(broken or not traced)


if __name__ == "__main__":
    sys.exit(main())

"""Pytest plugin: runs jax's own tests with `jax.jit`, or with `moe_jit` in its place, and writes what was seen.

In: `--jit=jit|moe_jit` and `--outcomes=FILE`.  Out: FILE, one JSON value a line: `{"started": test}`, then
`{"test": test, "outcome": "passed"|"failed"|"skipped", "error": first line or null}`; at the end `{"counts": ...}`.
Lines are written as tests run, so that a crash or a time limit loses only what comes after.

`jit` is replaced at every name that tests reach it by.  jax's own modules read some of these names too: whoever calls
from jax or from this package gets jax's jit, everybody else `moe_jit`.
"""

from __future__ import annotations

import collections
import functools
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest
from absl import logging

import moe_xla
import moe_xla.api
from moe_xla.passes import pipeline
from moe_xla.passes._jax import api_boundary, hide_frames
from tests.faults import is_internal_failure

hide_frames(__file__)

JIT, MOE_JIT = "jit", "moe_jit"
# The modules where tests find jit; `pjit`, deprecated, is another function and stays.
MODULES = ("jax", "jax._src.api")
# jax's helpers for tests hand functions of tests to jit, so they count as tests.
TEST_HELPERS = ("jax._src.test_util", "jax._src.internal_test_util", "jax.test_util")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin."""
    parser.addoption("--jit", choices=(JIT, MOE_JIT), required=True)
    parser.addoption("--outcomes", required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Replaces jit before any test module, and before the test helpers of jax, are imported."""
    outcomes = Outcomes(config.getoption("--outcomes"))
    config.pluginmanager.register(outcomes)
    if config.getoption("--jit") == MOE_JIT:
        jit = replacement(jax.jit)
        for module in MODULES:
            importlib.import_module(module).jit = jit
        _count(outcomes)
    importlib.import_module("jax._src.test_util")


class Outcomes:
    """Writes what becomes of each test; `counts` says how much `moe_jit` had to do with it."""

    def __init__(self, path: str) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.internal_failures: list[str] = []
        self._file = open(path, "w", buffering=1)  # a line at a time, as tests run
        self._verdict: dict[str, Any] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Notes the test, in case that it never ends."""
        self._verdict = {}
        self.internal_failures.clear()
        self._write({"started": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the worst of the phases of a test."""
        if self._verdict.get("outcome") != "failed" and (report.outcome != "passed" or report.when == "call"):
            self._verdict = {"outcome": report.outcome, "error": _first_line(report)}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Writes the verdict; a fault of the passes fails a test even where the step then ran as written."""
        if self.internal_failures:
            self._verdict = {"outcome": "failed", "error": self.internal_failures[0]}
        self._write({"test": nodeid, **self._verdict})

    def pytest_sessionfinish(self) -> None:
        """Writes the counts."""
        self._write({"counts": self.counts})
        self._file.close()

    def _write(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value) + "\n")


def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `original` for jax's own modules and `moe_jit` for all others."""

    @functools.wraps(original)
    def jit(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if _is_internal(caller) or "backend" in kwargs:  # moe_jit has another `backend`
            return original(*args, **kwargs)
        return moe_xla.moe_jit(*args, **kwargs)

    return jit


def _is_internal(module: str) -> bool:
    package = module.partition(".")[0]
    return package in ("jax", "moe_xla") and not module.startswith(TEST_HELPERS)


def _count(outcomes: Outcomes) -> None:
    """Counts functions made by `moe_jit`, their calls, programs that went through the passes, and layers rewritten."""
    step, rewrite_jaxpr = moe_xla.api.MoeJit, pipeline.rewrite_jaxpr
    make, call = step.__init__, step.__call__

    @functools.wraps(make)
    def counted_make(self: Any, *args: Any, **kwargs: Any) -> None:
        outcomes.counts["made"] += 1
        make(self, *args, **kwargs)

    @api_boundary
    @functools.wraps(call)
    def counted_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        outcomes.counts["called"] += 1
        return call(self, *args, **kwargs)

    def counted_rewrite(*args: Any) -> pipeline.Rewritten:
        outcomes.counts["traced"] += 1
        result = rewrite_jaxpr(*args)
        outcomes.counts["layers"] += sum(site.status == "rewritten" for site in result.sites)
        outcomes.internal_failures += [site.reason for site in result.sites if is_internal_failure(site.reason or "")]
        return result

    step.__init__, step.__call__, pipeline.rewrite_jaxpr = counted_make, counted_call, counted_rewrite
    warning = logging.warning

    def noted_warning(message: str, *args: Any) -> None:
        if is_internal_failure(message % args):
            outcomes.internal_failures.append(message % args)
        warning(message, *args)

    logging.warning = noted_warning


def _first_line(report: pytest.TestReport) -> str | None:
    if report.outcome != "failed":
        return None
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return next(iter(text.strip().splitlines()), "")

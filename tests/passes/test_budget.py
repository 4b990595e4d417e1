"""A program whose definitions grow too large is left as it is written, with that reason, and it is no fault."""

from __future__ import annotations

import jax
import pytest

import moe_xla
from moe_xla.passes import pipeline
from tests.faults import noted_faults
from tests.forms.check import assert_close, quick_jit
from tests.generated.programs import Program, build, finish, inputs

BUDGETS = [20, 60, 120, 200, 400]
PROGRAMS = {
    "plain": Program(),
    "scan_checkpoint": Program(around="scan_checkpoint"),
    "cond": Program(around="cond"),
    "list": Program(family="list"),
}

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("name", PROGRAMS)
def test_too_large_at_any_place(name, monkeypatch):
    program = PROGRAMS[name]
    fn, arguments = build(program), inputs(program)
    reasons, steps = [], {}
    with noted_faults() as faults:
        for budget in BUDGETS:
            monkeypatch.setattr(pipeline, "_budget", lambda closed, budget=budget: budget)
            step = moe_xla.moe_jit(build(program), semantics="exact")
            sites = step.explain(*arguments).sites
            reasons += [site.reason for site in sites if site.reason is not None]
            if any(site.status == "rewritten" for site in sites):
                steps[budget] = step
    assert not faults
    assert any("too large" in reason for reason in reasons)
    every = [finish(program, each) for each in (fn, *steps.values())]
    wanted, *actual = quick_jit(lambda *args: [run(*args) for run in every])(*arguments)
    jax.tree.map(lambda result: assert_close(result, wanted, 1e-9), actual, is_leaf=lambda a: isinstance(a, tuple))

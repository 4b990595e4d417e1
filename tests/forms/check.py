"""Comparisons and inspections that the tests over the forms share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

import moe_xla
import moe_xla.passes.site

from .form import HIDDEN, MODEL, Form


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the compiler's options that this version of XLA has."""
    known = {}
    for name, value in options.items():
        try:
            jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known


# Compiling costs more than running at these sizes; XLA's fusion emitters alone take two thirds of it.
QUICK = _known(
    {
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
)
TOLERANCE = {"float32": 2e-5, "float64": 2e-12}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the compiler made of a program: its outputs, the sites it reports and the slot arrays it left."""

    outputs: Any
    sites: tuple[moe_xla.passes.site.Site, ...]
    slot_arrays: list[str]


def rewrite_and_run(form: Form, program, semantics: str, inputs) -> Outcome:
    """Runs `program`, one of the form's at tight capacity, as `moe_jit` compiles it."""
    step = moe_xla.moe_jit(program, semantics=semantics, compiler_options=QUICK)
    sites = step.explain(*inputs).sites
    left = slot_arrays(form, step.trace(*inputs).jaxpr.jaxpr, form.tight)
    return Outcome(step(*inputs), sites, left)


def site_errors(form: Form, sites, semantics: str) -> list[str]:
    """What the report says other than: `form.sites` layers of the right sizes, rewritten as was asked."""
    errors = []
    if len(sites) != form.sites:
        errors.append(f"{len(sites)} sites, not {form.sites}")
    wanted = {
        "status": "rewritten",
        "semantics": semantics,
        "pattern": form.pattern,
        "reason": None,
        "tokens": form.tokens,
        "experts": form.experts,
        "choices": form.choices,
    }
    for number, site in enumerate(sites, 1):
        for field, value in wanted.items():
            if (actual := getattr(site, field)) != value:
                errors.append(f"site {number}: {field} is {actual!r}, not {value!r}")
        if site.status != "rewritten":
            errors.append(f"site {number} was stopped by {site.primitive} at {site.reason_source}")
    return errors


def quick_jit(fn):
    """`jax.jit` that compiles quickly and runs slowly."""
    return jax.jit(fn, compiler_options=QUICK)


def tolerance(form: Form, dtype) -> float:
    return form.tolerance or TOLERANCE[jnp.dtype(dtype).name]


def max_errors(actual, expected) -> list[tuple[str, float]]:
    """Per leaf: its path and the largest difference, relative to the largest expected magnitude in that leaf.

    Magnitudes count as 0.01 at least: a drop fraction of zero is a difference of numbers near one.
    """
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    errors = []
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        with np.errstate(invalid="ignore"):
            difference = np.where(a == b, 0, np.abs(a - b))
        scale = max(np.abs(b).max(initial=0), 1e-2)
        errors.append((jax.tree_util.keystr(path), float(difference.max(initial=0) / scale)))
    return errors


def assert_close(actual, expected, tol: float) -> None:
    """Every leaf within `tol` of `expected`, relative to the largest magnitude in the leaf; NaNs fail."""
    bad = [f"{path}: {error:.1e}" for path, error in max_errors(actual, expected) if not error <= tol]
    if bad:
        raise AssertionError(f"relative errors above {tol:.0e}: " + ", ".join(bad))


def shapes(jaxpr) -> Iterator[tuple[tuple[int, ...], str]]:
    """(shape, primitive) of every array that equations of `jaxpr` and of the jaxprs inside it produce."""
    for eqn in jaxpr.eqns:
        for out in eqn.outvars:
            yield tuple(getattr(out.aval, "shape", ())), eqn.primitive.name
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from shapes(inner)


def slot_arrays(form: Form, jaxpr, capacity: int) -> list[str]:
    """Arrays in `jaxpr` that a rewritten program must not hold.

    These are masks over slots, padded buffers, and a matrix of an expert for every assignment.  The sizes of the forms
    are distinct, so a shape gives its axes away: `capacity` (or one more) next to experts or tokens, or experts and
    slots merged into one axis, `capacity` next to features, or both sizes of a matrix next to tokens.
    """
    group_tokens = form.tokens // form.groups
    rows = {group_tokens, form.tokens, group_tokens * form.choices, form.tokens * form.choices}
    slots, merged = set(), set()
    for width in (capacity, capacity + 1):
        slots |= {width, form.groups * width}
        merged |= {form.experts * width, form.experts * form.groups * width}
    found = []
    for shape, primitive in shapes(jaxpr):
        sizes = set(shape)
        padded = (sizes & slots and sizes & (rows | {form.experts})) or (sizes & merged and len(shape) > 1)
        listed = capacity in sizes and sizes & {MODEL, HIDDEN}  # the rows of one expert
        wide = {MODEL, HIDDEN} <= sizes and sizes & rows  # a matrix of an expert for every assignment
        if padded or listed or wide:
            found.append(f"{primitive}{list(shape)}")
    return found

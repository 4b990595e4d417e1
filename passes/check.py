"""Checked mode: after each equation, is what the algebra says of an array what the program computes?

In: a closed jaxpr and concrete inputs.  Out: one line for each equation whose value, turned into an array the slow way
(`recover.reference`), differs from plain evaluation; the first line names the first fault.  Values are those of the
`exact` semantics, which must equal the program as written to rounding.  Bodies of scans and checkpoints count as one
equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.extend as jex
import numpy as np
from jax import numpy as jnp

from moe_xla.passes._jax import array_type, bind_equation, source_of
from moe_xla.passes.recover.interpret import Recovery
from moe_xla.passes.recover.nodes import is_extended, is_floating
from moe_xla.passes.recover.program import Step, Wire
from moe_xla.passes.recover.reference import Reference, TooLarge
from moe_xla.passes.recover.session import Session
from moe_xla.passes.recover.values import Value, is_boring


def compare_every_equation(
    closed: jex.core.ClosedJaxpr, inputs: Sequence[Any], options: Any = None, rtol: float = 1e-4
) -> tuple[str, ...]:
    """Compares every structured value of a program with plain evaluation.

    Args:
      closed: the traced program.
      inputs: its flat inputs, concrete arrays.
      options: the pass options; the check itself is always that of the exact semantics.
      rtol: allowed difference, relative to the largest finite magnitude of the array; four times the rounding of the
        program's shortest dtype is allowed in any case.

    Returns:
      One line per differing equation, in program order; empty where all agree.
    """
    del options
    recovery = Recovery(Session({}, "exact", enters=False))
    wires = [recovery.input(*array_type(v.aval)) for v in (*closed.jaxpr.constvars, *closed.jaxpr.invars)]
    count = len(closed.jaxpr.constvars)
    recovery.walk(closed.jaxpr, wires[:count], wires[count:])
    arrays: dict[Wire, Any] = dict(zip(wires, (*closed.consts, *inputs), strict=True))

    def array(wire: Wire) -> Any:
        if wire not in arrays:
            assert wire.step is not None
            atom = wire.step.eqn
            arrays[wire] = atom.val if hasattr(atom, "val") else atom
        return arrays[wire]

    reference = Reference(array)
    rtol = max(rtol, 4 * _coarsest_rounding(recovery.steps))
    found = []
    for step in recovery.steps:
        assert isinstance(step, Step)
        arrays.update(zip(step.outputs, bind_equation(step.eqn, [array(w) for w in step.inputs]), strict=True))
        found += [line for w in step.outputs if (line := _difference(reference, step, w, arrays[w], rtol)) is not None]
    return tuple(found)


def _coarsest_rounding(steps: Sequence[Any]) -> float:
    """The largest rounding step, relative to one, of the dtypes in a program."""
    dtypes = {w.dtype for step in steps for w in step.outputs if not is_extended(w.dtype)}
    return max((float(jnp.finfo(d).eps) for d in dtypes if is_floating(d)), default=0.0)


def _difference(reference: Reference, step: Step, wire: Wire, expected: Any, rtol: float) -> str | None:
    for value in (wire.value, wire.definition):
        if value is None or is_boring(value) or is_extended(value.dtype):
            continue
        line = _compare(reference, step, value, expected, rtol)
        if line is not None:
            return line
    return None


def _compare(reference: Reference, step: Step, value: Value, expected: Any, rtol: float) -> str | None:
    try:
        got = np.asarray(reference.value(value), np.float64)
    except TooLarge:
        return None
    want = np.asarray(expected).astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        difference = np.where(same, 0.0, np.abs(got - want))
    error = float(np.max(difference, initial=0.0))
    scale = float(np.max(np.abs(want), where=np.isfinite(want), initial=0.0))
    if error <= (rtol * scale if is_floating(value.dtype) else 0.0):
        return None
    return f"{step.name} at {source_of(step.source)}: differs by {error:.3g} (largest magnitude {scale:.3g})"

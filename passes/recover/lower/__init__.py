"""Emits the rewritten program: each array that is needed, in the cheapest sound way.

An array whose own equation can still be run, on inputs that can be had, is computed by that equation, exactly as
written.  An array that stands behind a slot axis is computed from its value instead: work on assignments happens on
*rows* sorted by expert, through `moe_xla.ops`; one plan per routing serves forward and backward.  An array over a slot
axis is never built: needing one is a `Refusal` that names the sites and the equation that asked.

In: a finished `Recovery` and the program's input arrays.  Out: output arrays.
"""

from moe_xla.passes.recover.lower.base import Refusal
from moe_xla.passes.recover.lower.program import Lowering

__all__ = ["Lowering", "Refusal"]

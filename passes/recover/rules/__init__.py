"""One rule per primitive: input values to output values, in index notation.

A rule is a function `(context, eqn, *values) -> Value`, registered by `@rule("name", …)` in `TABLE`.  It raises
`NoRule` with a reason where it does not apply; the equation is then run on arrays, exactly as written.
"""

from moe_xla.passes.recover.rules import calls, contractions, dots, elementwise, ranks, scatters, searches, structure
from moe_xla.passes.recover.rules.table import TABLE, Context

__all__ = [
    "TABLE",
    "Context",
    "calls",
    "contractions",
    "dots",
    "elementwise",
    "ranks",
    "scatters",
    "searches",
    "structure",
]

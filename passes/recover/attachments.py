"""What changes the derivative of an array and nothing else.

A rewritten program may be differentiated by its caller, and must then give the derivative that jax gives the program as
written.  So these operations are kept wherever something has a derivative, though they are the identity.

jax clamps what `x[index]` reads out of range, but drops the cotangents of these reads: `forward_only` says so of rows
that are read otherwise.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from moe_xla.ops.primitive import LinearOp, primitive


def _batch(prim: Any, operands: Any, dims: Any) -> tuple[Any, int]:
    return prim.bind(operands[0]), dims[0]


# The identity, also of tangents; its transpose is zero.
forward_only_p = primitive(
    LinearOp(
        name="forward_only",
        shape=lambda x: (x.shape, x.dtype),
        implementation=lambda x: x,
        transposes={0: lambda cotangent, x: lax.full_like(cotangent, 0)},
        batch=_batch,
    )
)

ATTACHMENTS = frozenset({"stop_gradient", forward_only_p.name})

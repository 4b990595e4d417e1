"""The grouped matmuls: rows against their expert's matrix, and its two gradients.

`grouped_dot`, `grouped_dot` with `transpose_w` and `grouped_outer` are closed under differentiation: each is bilinear
and its transposes are among the three.  They are primitives so that a later pass can read and set `backend` in a
jaxpr; "auto" is resolved when the program is lowered, by platform.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from moe_xla.ops import backends, checks
from moe_xla.ops.contract import Need
from moe_xla.ops.primitive import LinearOp, bind, primitive


def grouped_dot(
    rows: Any,
    w: Any,
    group_sizes: Any,
    *,
    transpose_w: bool = False,
    backend: str = "auto",
    preferred_element_type: Any = None,
    precision: Any = None,
) -> jax.Array:
    """Multiplies each row by the matrix of its group.

    Args:
      rows: [A, k] floating point, sorted by group; rows past the sum of `group_sizes` are the tail.
      w: [E, k, n] floating point, or [E, n, k] with `transpose_w`.
      group_sizes: [E] integers, on the device.
      transpose_w: contract the last axis of `w`.
      backend: name of a backend, or "auto" for the first eligible one.
      preferred_element_type: dtype of the result, the promoted dtype of `rows` and `w` if None.
      precision: as for `jax.lax.dot_general`; gradients use it too.

    Returns:
      [A, n], accumulated in float32 at least, zero in tail rows.  NaN in tail rows goes nowhere; NaN in one expert's
      weights reaches only the rows of that expert.

    Raises:
      TypeError: an operand is not floating point, or `group_sizes` not integer.
      ValueError: shapes do not agree, the backend is unknown, or (when lowered) its contract does not cover the need.
    """
    rows_ak, w_ekn = checks.float_array("rows", rows, 2), checks.float_array("w", w, 3)
    sizes = checks.int_vector("group_sizes", group_sizes)
    k_axis = 2 if transpose_w else 1
    checks.equal("the leading size of w", w_ekn.shape[0], "the size of group_sizes", sizes.size)
    checks.equal("the last size of rows", rows_ak.shape[1], f"size {k_axis} of w", w_ekn.shape[k_axis])
    default = jnp.promote_types(rows_ak.dtype, w_ekn.dtype)
    return bind(
        grouped_dot_p,
        rows_ak,
        w_ekn,
        sizes,
        transpose_w=bool(transpose_w),
        backend=backends.check_name(backend),
        preferred_element_type=checks.float_dtype("preferred_element_type", preferred_element_type, default),
        precision=checks.precision(precision),
    )


def grouped_outer(
    a: Any,
    b: Any,
    group_sizes: Any,
    *,
    backend: str = "auto",
    preferred_element_type: Any = None,
    precision: Any = None,
) -> jax.Array:
    """Sums, for each group, the outer products of its rows of `a` and `b`: the weight gradient of `grouped_dot`.

    Args:
      a: [A, m] floating point, sorted by group.
      b: [A, n] floating point.
      group_sizes: [E] integers, on the device.
      backend: name of a backend, or "auto" for the first eligible one.
      preferred_element_type: dtype of the result, the promoted dtype of `a` and `b` if None.
      precision: as for `jax.lax.dot_general`; gradients use it too.

    Returns:
      [E, m, n], accumulated in float32 at least, exactly zero for empty groups; tail rows are not read.

    Raises:
      TypeError: an operand is not floating point, or `group_sizes` not integer.
      ValueError: shapes do not agree, the backend is unknown, or (when lowered) its contract does not cover the need.
    """
    a_am, b_an = checks.float_array("a", a, 2), checks.float_array("b", b, 2)
    sizes = checks.int_vector("group_sizes", group_sizes)
    checks.equal("the leading size of a", a_am.shape[0], "the leading size of b", b_an.shape[0])
    return bind(
        grouped_outer_p,
        a_am,
        b_an,
        sizes,
        backend=backends.check_name(backend),
        preferred_element_type=checks.float_dtype(
            "preferred_element_type", preferred_element_type, jnp.promote_types(a_am.dtype, b_an.dtype)
        ),
        precision=checks.precision(precision),
    )


def _dot(
    rows: Any, w: Any, sizes: Any, *, transpose_w: bool, preferred_element_type: Any, platform: str, **rest: Any
) -> jax.Array:
    k, n = rows.shape[1], w.shape[1 if transpose_w else 2]
    chosen = backends.resolve(rest["backend"], Need(platform, (rows.dtype, w.dtype), k, n))
    return backends.BACKENDS[chosen].grouped_dot(
        rows, w, sizes, transpose_w=transpose_w, out_dtype=preferred_element_type, precision=rest["precision"]
    )


def _outer(a: Any, b: Any, sizes: Any, *, preferred_element_type: Any, platform: str, **rest: Any) -> jax.Array:
    chosen = backends.resolve(rest["backend"], Need(platform, (a.dtype, b.dtype), a.shape[1], b.shape[1]))
    return backends.BACKENDS[chosen].grouped_outer(
        a, b, sizes, out_dtype=preferred_element_type, precision=rest["precision"]
    )


def _dot_shape(rows: Any, w: Any, sizes: Any, *, transpose_w: bool, preferred_element_type: Any, **_: Any) -> Any:
    return (rows.shape[0], w.shape[1 if transpose_w else 2]), preferred_element_type


def _outer_shape(a: Any, b: Any, sizes: Any, *, preferred_element_type: Any, **_: Any) -> Any:
    return (sizes.shape[0], a.shape[1], b.shape[1]), preferred_element_type


def _dot_rows_ct(ct: Any, rows: Any, w: Any, sizes: Any, **params: Any) -> jax.Array:
    transpose_w = not params["transpose_w"]
    return bind(grouped_dot_p, ct, w, sizes, **_with(params, rows, transpose_w=transpose_w))


def _dot_w_ct(ct: Any, rows: Any, w: Any, sizes: Any, *, transpose_w: bool, **params: Any) -> jax.Array:
    a, b = (ct, rows) if transpose_w else (rows, ct)
    return bind(grouped_outer_p, a, b, sizes, **_with(params, w))


def _outer_a_ct(ct: Any, a: Any, b: Any, sizes: Any, **params: Any) -> jax.Array:
    return bind(grouped_dot_p, b, ct, sizes, **_with(params, a, transpose_w=True))


def _outer_b_ct(ct: Any, a: Any, b: Any, sizes: Any, **params: Any) -> jax.Array:
    return bind(grouped_dot_p, a, ct, sizes, **_with(params, b, transpose_w=False))


def _with(params: dict[str, Any], of: Any, **changes: Any) -> dict[str, Any]:
    """`params` of the product that is the cotangent of operand `of`, which has its dtype."""
    return {**params, **changes, "preferred_element_type": np.dtype(of.dtype)}


grouped_dot_p = primitive(
    LinearOp(
        name="grouped_dot",
        shape=_dot_shape,
        implementation=_dot,
        transposes={0: _dot_rows_ct, 1: _dot_w_ct},
        per_platform=True,
    )
)

grouped_outer_p = primitive(
    LinearOp(
        name="grouped_outer",
        shape=_outer_shape,
        implementation=_outer,
        transposes={0: _outer_a_ct, 1: _outer_b_ct},
        per_platform=True,
    )
)

"""Rows that a loop adds into one array, as one scatter of the rows of all its iterations."""

from __future__ import annotations

from typing import Any

from moe_xla.passes._jax import bind_equation


def adds_rows(op: Any) -> bool:
    """Whether an operation adds rows to its first operand at places that an index array names."""
    return bool(op.name == "scatter-add")


def scatter_all(eqn: Any, start: Any, indices: Any, rows: Any) -> Any:
    """`start` with the rows of all iterations added, which stand along a first axis of `indices` and `rows`.

    Where several rows meet, they are added in another order than by a scatter for each iteration.
    """
    numbers = eqn.params["dimension_numbers"]
    shifted = numbers._replace(
        update_window_dims=tuple(d + 1 for d in numbers.update_window_dims),
        scatter_indices_batching_dims=tuple(d + 1 for d in numbers.scatter_indices_batching_dims),
    )
    params = {"dimension_numbers": shifted, "indices_are_sorted": False, "unique_indices": False}
    return bind_equation(eqn.replace(params=eqn.params | params), [start, indices, rows])[0]

"""Mixture-of-Experts operations on compact rows: what the compiler rewrites to, and an API to write MoE by hand.

    route = plan(expert_index, E)                      # expert_index [T, K] -> who sits where
    rows = dispatch(x, route)                          # [T, d] -> [A, d], sorted by expert, A = T * K
    h = jax.nn.gelu(grouped_dot(rows, w_in, route.group_sizes))
    y = combine(grouped_dot(h, w_out, route.group_sizes), weights, route)    # [T, d]

Shapes are static and group sizes stay on the device.  Every function can be jitted, differentiated to any order in
both modes, batched, scanned and rematerialised.  Rows past the last group (the tail) are zero in and out and are never
read into a sum; NaN in one expert's weights reaches only that expert's rows; sums are kept in float32 at least.
"""

from moe_xla.ops.backends import default_platform, eligible, refusals, resolve
from moe_xla.ops.contract import Contract, Need
from moe_xla.ops.grouped import grouped_dot, grouped_dot_p, grouped_outer, grouped_outer_p
from moe_xla.ops.groups import add_group_bias, group_max, group_sum
from moe_xla.ops.routing import Plan, expert_of_row, plan, rank
from moe_xla.ops.rows import combine, dispatch, row_dot, sort_rows, unsort_rows

__all__ = [
    "Contract",
    "Need",
    "Plan",
    "add_group_bias",
    "combine",
    "default_platform",
    "dispatch",
    "eligible",
    "expert_of_row",
    "group_max",
    "group_sum",
    "grouped_dot",
    "grouped_dot_p",
    "grouped_outer",
    "grouped_outer_p",
    "plan",
    "rank",
    "refusals",
    "resolve",
    "row_dot",
    "sort_rows",
    "unsort_rows",
]

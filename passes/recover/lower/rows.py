"""Work on the rows of a routing: assignments sorted by expert, each expert's rows side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla import ops
from moe_xla.passes.recover.grouping import Grouping, grouping_of
from moe_xla.passes.recover.lower.arrays import arranged, matched, ordered_after, pad, spread, take_rows, where
from moe_xla.passes.recover.lower.base import (
    Layout,
    Routing,
    routing_by,
    unheld,
)
from moe_xla.passes.recover.lower.definitions import DefinitionEmitter
from moe_xla.passes.recover.nodes import (
    Ein,
    Lit,
    Map,
    Node,
    Pad,
    Slice,
    is_floating,
)
from moe_xla.passes.recover.terms import (
    Const,
    Factor,
    Term,
    Var,
    factor_vars,
    key_of,
    term_vars,
)

_ROW = Var(-1, 0)


class RowEmitter(DefinitionEmitter):
    """Emits nodes that live on rows: grouped matmuls, and maps of them."""

    def plan(self, routing: Routing) -> ops.Plan:
        if routing not in self.plans:
            index, variables = routing.index, term_vars(routing.index)
            sizes = [v.size for v in variables]
            expert = spread(jnp.asarray(self.fetch(index.factor, variables)), sizes)
            expert = lax.convert_element_type(expert, np.int32)
            held = self.conditions(sorted(routing.held, key=repr), variables, sizes)
            if held is not None:
                expert = lax.select(held, expert, lax.full_like(expert, index.size))
            self.plans[routing] = ops.plan(expert, index.size)
        return self.plans[routing]

    def grouping(self, node: Node) -> Grouping | None:
        """How a node is a grouped matmul with all its assignments on its axes, or None."""
        if not isinstance(node, Ein):
            return None
        if node not in self.groupings:
            self.groupings[node] = grouping_of(node)
        return self.groupings[node]

    def layout(self, node: Node) -> Layout | None:
        """The rows a node lives on, when its work is done on rows; None for an ordinary array."""
        key = (node, node.domain) if isinstance(node, Ein) else node
        if key not in self.layouts:
            self.layouts[key] = None
            self.layouts[key] = self._layout(node)
        return self.layouts[key]

    def _layout(self, node: Node) -> Layout | None:
        if isinstance(node, Ein):
            grouping = self.grouping(node)
            if grouping is None:
                return None
            variables = term_vars(grouping.place)
            routing = routing_by(self.graph, grouping.place, [*node.guards, *node.domain])
            return Layout(routing, tuple(node.out.index(v) for v in variables))
        if isinstance(node, Map):
            for operand in node.operands:
                layout = self.layout(operand.node)
                if layout is None or not all(isinstance(a, Var) for a in operand.args):
                    continue
                axes = [operand.args[i] for i in layout.axes]
                return Layout(layout.routing, tuple(v.id for v in axes))  # type: ignore[union-attr]
        if isinstance(node, (Slice, Pad)):
            layout = self.layout(node.base)
            return layout if layout is not None and node.axis not in layout.axes else None
        return None

    def unsorted(self, node: Node, layout: Layout) -> Any:
        rest = tuple(Var(i, n) for i, n in enumerate(node.shape) if i not in layout.axes)
        points = tuple(Var(i, node.shape[i]) for i in layout.axes)
        rows = self.node_rows(node, layout)
        plan = self.plan(layout.routing)
        data = take_rows(rows, plan.inverse, unique=True)
        data = lax.reshape(data, [v.size for v in (*points, *rest)])
        return arranged(data, (*points, *rest), node.variables)

    def node_rows(self, node: Node, layout: Layout) -> Any:
        """The rows [A, rest…] of a node that lives on rows; rest are its other axes in order."""
        key = ("rows", node, layout)
        if key not in self.rows:
            self.rows[key] = self._emit_rows(node, layout)
        return self.rows[key]

    def _emit_rows(self, node: Node, layout: Layout) -> Any:
        points = tuple(Var(i, node.shape[i]) for i in layout.axes)
        rest = tuple(Var(i, n) for i, n in enumerate(node.shape) if i not in layout.axes)
        assignments = math.prod(v.size for v in points)
        if isinstance(node, Map):
            self.check_positions(node)
            operands = [self.factor_rows(op, layout.routing, points, rest) for op in node.operands]
            return self.apply(node, operands, (assignments, *(v.size for v in rest)))
        if isinstance(node, (Slice, Pad)):
            base = self.node_rows(node.base, layout)
            axis = 1 + [i for i in range(len(node.shape)) if i not in layout.axes].index(node.axis)
            if isinstance(node, Slice):
                return lax.slice_in_dim(base, node.start, node.stop, axis=axis)
            return pad(base, axis, node.low, node.high)
        assert isinstance(node, Ein)
        return self._grouped_rows(node, layout)

    def _grouped_rows(self, node: Ein, layout: Layout) -> Any:
        grouping = self.grouping(node)
        assert grouping is not None
        points = term_vars(grouping.place)
        inner, free = grouping.inner, grouping.free
        left = self.product_rows(grouping.left, layout.routing, points, inner, node.guards)
        rows = lax.reshape(left, (left.shape[0], math.prod(v.size for v in inner)))
        weights, args = self._at_fixed_places(grouping.weight)
        axis = args.index(grouping.place)
        order = [axis, *(args.index(v) for v in inner), *(args.index(v) for v in free)]
        experts, k, n = grouping.place.size, rows.shape[1], math.prod(v.size for v in free)
        flipped = [axis, *order[1 + len(inner) :], *order[1 : 1 + len(inner)]]
        if flipped == sorted(flipped) and order != sorted(order):
            matrix = lax.reshape(weights, (experts, n, k))
            out = self._grouped_dot(rows, matrix, layout.routing, True, node.dtype)
        else:
            matrix = lax.reshape(lax.transpose(weights, order), (experts, k, n))
            out = self._grouped_dot(rows, matrix, layout.routing, False, node.dtype)
        if node.coef != 1:
            out = out * np.asarray(node.coef, out.dtype)
        out = lax.reshape(out, (out.shape[0], *(v.size for v in free)))
        position = {v: i for i, v in enumerate(free)}
        wanted = [position[v] for v in node.out if v in position]
        return lax.transpose(out, [0, *(1 + i for i in wanted)])

    def _at_fixed_places(self, factor: Factor) -> tuple[Any, list[Term]]:
        """The array of a factor where it is read at fixed places, and the other places."""
        data = self.node(factor.node)
        for i in reversed(range(len(factor.args))):
            place = factor.args[i]
            if isinstance(place, Const):
                data = lax.index_in_dim(data, place.value, i, keepdims=False)
        return data, [a for a in factor.args if not isinstance(a, Const)]

    def _grouped_dot(self, rows: Any, matrix: Any, routing: Routing, transpose: bool, dtype: Any) -> Any:
        self.note_matmul(routing, (rows.shape[0], *matrix.shape[1:]), (rows.dtype, matrix.dtype))
        kind = jnp.promote_types(rows.dtype, matrix.dtype)
        result = ops.grouped_dot(
            rows.astype(kind),
            matrix.astype(kind),
            self.ordered_sizes(routing),
            transpose_w=transpose,
            backend=self.backend,
            preferred_element_type=dtype,
        )
        self._latest = result
        return result

    def ordered_sizes(self, routing: Routing) -> Any:
        """The group sizes of a routing, known only after the grouped matmul before this one.

        The order of this program frees rows as early as it can (a weight gradient right before the gradient of the rows
        it was made from); XLA:CPU would else choose an order that keeps more of them.
        """
        sizes = self.plan(routing).group_sizes
        if self._latest is None or jax.default_backend() != "cpu" or not is_floating(self._latest.dtype):
            return sizes
        return ordered_after(sizes, self._latest)

    def note_matmul(self, routing: Routing, sizes: tuple[int, int, int], dtypes: Sequence[Any]) -> None:
        need = ops.Need(ops.default_platform(), tuple(np.dtype(d) for d in dtypes), sizes[1], sizes[2])
        rows = sizes[0] * self.graph.expected.get(routing.index.node, routing.index.size) // routing.index.size
        self.flops.append((key_of(routing.index), 2 * rows * sizes[1] * sizes[2]))
        self.backends.append((key_of(routing.index), ops.resolve(self.backend, need)))

    def product_rows(
        self,
        factors: Sequence[Factor],
        routing: Routing,
        points: Sequence[Var],
        rest: Sequence[Var],
        guards: Sequence[Factor],
    ) -> Any:
        """The product of factors on rows, zero where a guard fails; anything in the tail."""
        total: Any = None
        for factor in factors:
            rows = self.factor_rows(factor, routing, points, rest)
            total = rows if total is None else lax.mul(*matched(total, rows))
        assignments = math.prod(v.size for v in points)
        if total is None:
            total = np.ones((1,) * (1 + len(rest)))
        total = spread(jnp.asarray(total), (assignments, *(v.size for v in rest)))
        for guard in unheld(guards, routing, points):
            held = self.factor_rows(guard, routing, points, rest)
            total = where(held, total)
        return total

    def factor_rows(self, factor: Factor, routing: Routing, points: Sequence[Var], rest: Sequence[Var]) -> Any:
        """A factor on the rows of a routing: [A, rest…], with length 1 where it does not depend on an axis."""
        if isinstance(factor.node, Lit):
            return np.asarray(factor.node.value).reshape([1] * (1 + len(rest)))
        layout = self.layout(factor.node)
        if layout is not None and layout.routing == routing and all(isinstance(a, Var) for a in factor.args):
            if [factor.args[i] for i in layout.axes] == list(points):
                rows = self.node_rows(factor.node, layout)
                names = [a for i, a in enumerate(factor.args) if i not in layout.axes]
                if not set(names) <= set(rest):
                    self.refuse([routing.index], "rows of which each meets every token")
                return arranged(rows, (_ROW, *names), (_ROW, *rest))  # type: ignore[arg-type]
        used = [v for v in points if v in factor_vars([factor])]
        if not used:
            return self.fetch(factor, rest)[None]
        if len(used) < len(points) and any(v in factor_vars([factor]) for v in rest):
            self.tokens.append((key_of(routing.index), math.prod(v.size for v in used)))
        data = jnp.asarray(self.fetch(factor, (*used, *rest)))
        table = lax.reshape(data, (math.prod(v.size for v in used), *data.shape[len(used) :]))
        return take_rows(table, self._row_index(routing, points, used))

    def _row_index(self, routing: Routing, points: Sequence[Var], used: Sequence[Var]) -> Any:
        """For each row, the place of its assignment among the variables `used`."""
        key = ("index", routing, tuple(v in used for v in points))
        if key not in self.rows:
            place: Any = None
            stride = math.prod(v.size for v in points)
            for v in points:
                stride //= v.size
                if v not in used:
                    continue
                digit = self.plan(routing).permutation
                if stride > 1:
                    digit = lax.div(digit, np.int32(stride))
                if v is not points[0]:
                    digit = lax.rem(digit, np.int32(v.size))
                place = digit if place is None else place * np.int32(v.size) + digit
            self.rows[key] = place
        return self.rows[key]

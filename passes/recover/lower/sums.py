"""Sums: einsums over arrays, the combine, row-wise dots, and what is summed over the rows of each expert."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import jax.extend.core.primitives as prims
import numpy as np
from jax import lax
from jax import numpy as jnp

from moe_xla import ops
from moe_xla.passes.recover.facts import rank_sites
from moe_xla.passes.recover.lower.arrays import arranged, column, spread, take_rows, where
from moe_xla.passes.recover.lower.base import (
    Layout,
    Refusal,
    Routing,
    routing_by,
    unheld,
)
from moe_xla.passes.recover.lower.rows import RowEmitter
from moe_xla.passes.recover.nodes import (
    Ein,
    is_boolean,
    is_floating,
)
from moe_xla.passes.recover.terms import (
    UNIT,
    Const,
    Factor,
    Idx,
    Term,
    Var,
    factor_vars,
    flatten,
    parts_of,
    term_vars,
    vars_of,
)
from moe_xla.passes.recover.values import host_of, masked


class SumEmitter(RowEmitter):
    """Emits einsum nodes, each in the cheapest way that its factors allow."""

    def ein(self, node: Ein) -> Any:
        if any(isinstance(p, Idx) for t in node.out for p in parts_of(t)):
            return self._scatter(node)
        split = self._split_grouped(node)
        if split is not None:
            return self.ein(split)
        combined = self._combined(node)
        if combined is not None:
            return combined
        dotted = self._row_dotted(node)
        if dotted is not None:
            return dotted
        out = tuple(p for t in node.out for p in parts_of(t))
        assert all(isinstance(p, Var) for p in out), out
        guards = [*node.guards, *self._equal_guards(node)]
        data = self.einsum(node.factors, guards, out, node.coef, node.dtype)  # type: ignore[arg-type]
        return lax.reshape(data, node.shape) if data.shape != node.shape else data

    def _equal_guards(self, node: Ein) -> list[Factor]:
        """Equalities that no proof discharged, as conditions; between slots they would compare every pair of rows."""
        sites = frozenset().union(*(rank_sites(self.graph, t.node) for pair in node.equalities for t in pair))
        if sites:
            raise Refusal(sites, "slots that are not provably the same or different", self.asker())
        return [self.graph.compare(prims.eq_p, a.factor, b.factor) for a, b in sorted(node.equalities, key=repr)]

    def _split_grouped(self, node: Ein) -> Ein | None:
        """A grouped matmul whose assignments are partly summed: the matmul first, the sum over assignments after."""
        for weight in node.factors:
            places = [a for a in weight.args if isinstance(a, Idx)]
            if len(places) != 1 or not all(isinstance(a, (Var, Idx, Const)) for a in weight.args):
                continue
            points = term_vars(places[0])
            inner = [a for a in weight.args if isinstance(a, Var) and a in node.binders and a not in points]
            if not inner or all(p in node.out for p in points):
                continue
            joined = tuple(f for f in node.factors if set(inner) & set(factor_vars([f])))
            outer = tuple(f for f in node.factors if f not in joined)
            free = [a for a in weight.args if isinstance(a, Var) and a not in inner and a not in points]
            if set(factor_vars(joined)) - set(points) - set(inner) - set(free):
                continue
            masks = [g for g in node.guards if set(factor_vars([g])) & set(inner)]
            guards = tuple(g for g in node.guards if g not in masks)
            rows = self._masked(joined, masks)
            if rows is None:
                continue
            axes = (*points, *free)
            domain = (*guards, *node.domain)
            matmul = self.graph.ein(axes, rows, (), frozenset(), 1, node.dtype, domain=domain)
            if self.grouping(matmul) is None:
                continue
            whole = self.graph.ein(
                node.out,
                (*outer, Factor(matmul, axes)),
                guards,
                node.equalities,
                node.coef,
                node.dtype,
            )
            assert isinstance(whole, Ein) and len(whole.binders) == len(node.binders) - len(inner)
            return whole
        return None

    def _masked(self, factors: tuple[Factor, ...], masks: Sequence[Factor]) -> tuple[Factor, ...] | None:
        """Factors that are zero where a mask fails; None where a mask belongs to no factor alone."""
        result = list(factors)
        for mask in masks:
            host = host_of(result, mask)
            if host is None:
                return None
            result[host] = masked(self.graph, result[host], mask)
        return tuple(result)

    def _row_factor(self, node: Ein) -> tuple[Factor, Layout] | None:
        for factor in node.factors:
            layout = self.layout(factor.node)
            if layout is not None and all(isinstance(a, Var) for a in factor.args):
                return factor, layout
        return None

    def _combined(self, node: Ein) -> Any:
        """Σ over choices of weight · row, per token: the combine."""
        found = self._row_factor(node)
        if found is None or node.equalities:
            return None
        factor, layout = found
        points = tuple(factor.args[i] for i in layout.axes)
        rest = tuple(a for i, a in enumerate(factor.args) if i not in layout.axes)
        summed = tuple(p for p in points if p in node.binders)
        others = [f for f in node.factors if f is not factor]
        if set(node.binders) != set(summed) or set(factor_vars([*others, *node.guards])) - set(points):
            return None
        kept = tuple(p for p in points if p not in summed)
        if set(node.out) != {*kept, *rest}:
            return None
        order = (*kept, *summed)
        inverse = lax.reshape(self.plan(layout.routing).inverse, [v.size for v in points])
        inverse = lax.transpose(inverse, [points.index(v) for v in order])
        tokens, choices = math.prod(v.size for v in kept), math.prod(v.size for v in summed)
        inverse = lax.reshape(inverse, (tokens, choices))
        weights = self.weights(others, order, (tokens, choices))
        held = self.conditions(node.guards, order, (tokens, choices))
        rows = self.node_rows(factor.node, layout)
        total: Any = None
        wide = np.promote_types(node.dtype, np.float32) if is_floating(node.dtype) else node.dtype
        for k in range(choices):
            row = lax.convert_element_type(take_rows(rows, lax.index_in_dim(inverse, k, 1, False)), wide)
            if weights is not None:
                row = lax.mul(row, spread(lax.convert_element_type(column(weights, k, row.ndim), wide), row.shape))
            if held is not None:
                row = where(column(held, k, row.ndim), row)
            total = row if total is None else lax.add(total, row)
        if node.coef != 1:
            total = total * np.asarray(node.coef, wide)
        total = lax.convert_element_type(total, node.dtype)
        data = lax.reshape(total, [v.size for v in (*kept, *rest)])
        return arranged(data, (*kept, *rest), node.out)  # type: ignore[arg-type]

    def _row_dotted(self, node: Ein) -> Any:
        """Σ over features of a product of rows, per assignment: the gradient of the combine weights."""
        found = self._row_factor(node)
        if found is None or node.equalities or not is_floating(node.dtype):
            return None
        factor, layout = found
        points = tuple(factor.args[i] for i in layout.axes)
        features = tuple(v for v in factor_vars(node.factors) if v not in points)
        if set(node.out) != set(points) or set(node.binders) != set(features):
            return None
        if not set(factor_vars(node.guards)) <= set(points):
            return None
        product = self.product_rows(node.factors, layout.routing, points, features, ())  # type: ignore[arg-type]
        wide = np.promote_types(node.dtype, np.float32)
        total = lax.reduce_sum(lax.convert_element_type(product, wide), range(1, product.ndim))
        total = total * np.asarray(node.coef, wide) if node.coef != 1 else total
        for guard in node.guards:
            held = self.factor_rows(guard, layout.routing, points, ())  # type: ignore[arg-type]
            total = where(held, total)
        data = take_rows(total.astype(node.dtype), self.plan(layout.routing).inverse, unique=True)
        return arranged(lax.reshape(data, [v.size for v in points]), points, node.out)  # type: ignore[arg-type]

    def einsum(
        self, factors: Sequence[Factor], guards: Sequence[Factor], out: Sequence[Var], coef: Any, dtype: Any
    ) -> Any:
        arrays, names = [], []
        for factor in factors:
            variables = factor_vars([factor])
            arrays.append(lax.convert_element_type(jnp.asarray(self.fetch(factor, variables)), dtype))
            names.append(variables)
        for guard in guards:
            variables = factor_vars([guard])
            held = jnp.asarray(self.fetch(guard, variables))
            host = next((i for i, vs in enumerate(names) if set(variables) <= set(vs)), None)
            if host is None:
                arrays.append(lax.convert_element_type(held, dtype))
                names.append(variables)
            else:
                arrays[host] = where(arranged(held, variables, names[host]), arrays[host])
        used = {v for vs in names for v in vs}
        letters: dict[Var, str] = {
            v: string.ascii_letters[i] for i, v in enumerate(dict.fromkeys(v for vs in names for v in vs))
        }
        result_vars = tuple(v for v in out if v in used)
        if arrays:
            spec = ",".join("".join(letters[v] for v in vs) for vs in names)
            spec += "->" + "".join(letters[v] for v in result_vars)
            result = jnp.einsum(spec, *arrays, preferred_element_type=None if is_boolean(dtype) else dtype).astype(
                dtype
            )
        else:
            result = jnp.ones((), dtype)
        if coef != 1:
            result = result * np.asarray(coef, dtype)
        return spread(arranged(result, result_vars, out), [v.size for v in out])

    def _scatter(self, node: Ein) -> Any:
        out = tuple(p for t in node.out for p in parts_of(t))
        indices = [t for t in out if isinstance(t, Idx)]
        sites = frozenset().union(*(rank_sites(self.graph, t.node) for t in indices))
        if sites and (len(out) > 1 or any(self.recovery.session.is_dropless(s) for s in sites)):
            raise Refusal(sites, "an array over the slot axis is needed", self.asker())
        if node.reducer == "max":
            return self._group_maxima(node, out, indices)
        grouped = self._group_reduced(node, out, indices)
        if grouped is None:
            grouped = self._scattered(node, out, indices)
        return lax.reshape(grouped, node.shape) if grouped.shape != node.shape else grouped

    def _group_reduced(self, node: Ein, out: tuple[Term, ...], indices: list[Idx]) -> Any:
        """Sums over the assignments of each expert: weight gradients (outer products) and bias gradients."""
        index = _one_index(indices)
        if index is None or node.equalities or not is_floating(node.dtype) or not node.factors:
            return None
        points = term_vars(index)
        dense = [t for t in out if isinstance(t, Var)]
        if set(points) & set(dense) or len(dense) + len(indices) != len(out):
            return None
        repeated = [v for v in dense if v not in factor_vars(node.factors)]
        dense = [v for v in dense if v not in repeated]
        if set(factor_vars(node.factors)) - set(points) - set(dense) or set(factor_vars(node.guards)) - set(points):
            return None
        if set(node.binders) != set(points):
            return None
        routing = self._reduced_routing(node, index)
        left, right = _sides(node.factors, dense)
        if left is None:
            self.refuse_wide_rows([index], dense)
            product = self.product_rows(node.factors, routing, points, dense, node.guards)
            flat = lax.reshape(product, (product.shape[0], math.prod(v.size for v in dense)))
            total = ops.group_sum(flat.astype(node.dtype), self.plan(routing).group_sizes)
            order = [*indices, *dense]
        else:
            a_vars = [v for v in dense if v in factor_vars(left)]
            b_vars = [v for v in dense if v not in a_vars]
            a = self.product_rows(left, routing, points, a_vars, node.guards)
            b = self.product_rows(right, routing, points, b_vars, node.guards)
            a = lax.reshape(a, (a.shape[0], math.prod(v.size for v in a_vars)))
            b = lax.reshape(b, (b.shape[0], math.prod(v.size for v in b_vars)))
            kind = jnp.promote_types(a.dtype, b.dtype)
            self.note_matmul(routing, (a.shape[0], a.shape[1], b.shape[1]), (a.dtype, b.dtype))
            total = self._latest = ops.grouped_outer(
                a.astype(kind),
                b.astype(kind),
                self.ordered_sizes(routing),
                backend=self.backend,
                preferred_element_type=node.dtype,
            )
            order = [*indices, *a_vars, *b_vars]
        total = lax.reshape(total, [t.size for t in order])  # type: ignore[attr-defined]
        if node.coef != 1:
            total = total * np.asarray(node.coef, total.dtype)
        total = lax.broadcast_in_dim(total, (*total.shape, *(v.size for v in repeated)), range(total.ndim))
        order += repeated
        return lax.transpose(total, [order.index(t) for t in out])

    def _reduced_routing(self, node: Ein, index: Idx) -> Routing:
        """The routing to reduce on: one that the factors live on already, if its conditions are among the node's."""
        whole = routing_by(self.graph, index, node.guards)
        for factor in node.factors:
            layout = self.layout(factor.node)
            if layout is not None and all(isinstance(a, Var) for a in factor.args):
                matches = layout.routing.index == whole.index and layout.routing.held <= whole.held
                if matches and [factor.args[i] for i in layout.axes] == list(term_vars(index)):
                    return layout.routing
        return whole

    def _group_maxima(self, node: Ein, out: tuple[Term, ...], indices: list[Idx]) -> Any:
        """The largest row of each expert, `initial` where it has none."""
        points = term_vars(indices[0])
        dense = [t for t in out if isinstance(t, Var)]
        if len(indices) != 1 or set(points) & set(dense) or len(dense) + 1 != len(out) or len(node.factors) != 1:
            sites = frozenset().union(*(rank_sites(self.graph, g.node) for g in node.guards))
            raise Refusal(sites, "a maximum over slots that are not those of one expert", self.asker())
        routing = self._reduced_routing(node, indices[0])
        rows = self.factor_rows(node.factors[0], routing, points, dense)
        rows = spread(jnp.asarray(rows), (math.prod(v.size for v in points), *(v.size for v in dense)))
        lowest = np.asarray(node.initial, node.dtype)
        for guard in unheld(node.guards, routing, points):
            rows = where(self.factor_rows(guard, routing, points, dense), rows, lowest)
        flat = lax.reshape(rows, (rows.shape[0], math.prod(v.size for v in dense)))
        largest = ops.group_max(flat, self.plan(routing).group_sizes, lowest)
        largest = lax.reshape(largest, (indices[0].size, *(v.size for v in dense)))
        order = [indices[0], *dense]
        return lax.transpose(largest, [order.index(t) for t in out])

    def _are_pairs(self, indices: list[Idx], out: tuple[Term, ...]) -> bool:
        """Whether experts of a threshold stand beside all else that their index is over: choice j is expert j."""
        if len(indices) != 1 or indices[0].node not in self.graph.kept:
            return False
        *tokens, choice = indices[0].args
        return isinstance(choice, Var) and choice not in out and set(tokens) - {UNIT} == set(out) - {indices[0]}

    def _scattered(self, node: Ein, out: tuple[Term, ...], indices: list[Idx]) -> Any:
        points = vars_of(indices)
        if set(out) == {*indices, *(v for v in points if v in out)} and self._are_pairs(indices, out):
            pairs = [t.args[-1] if isinstance(t, Idx) else t for t in out]
            return self.einsum(node.factors, node.guards, pairs, node.coef, node.dtype)  # type: ignore[arg-type]
        dense = tuple(t for t in out if isinstance(t, Var) and t not in points)
        self.refuse_wide_rows(indices, dense)
        if dense and any(t in points for t in out) and is_floating(node.dtype):
            self.refuse(indices, "lays the work of chosen experts out over all of them")
        guards = [*node.guards, *self._equal_guards(node)]
        rows = self.einsum(node.factors, guards, (*points, *dense), node.coef, node.dtype)
        leading = [t for t in out if isinstance(t, Idx) or t in points]
        places = []
        for term in leading:
            if isinstance(term, Idx):
                place = lax.convert_element_type(jnp.asarray(self.fetch(term.factor, points)), np.int32)
                places.append(jnp.where(place < 0, term.size, place))
            elif isinstance(term, Const):
                places.append(jnp.full([1] * len(points), term.value, np.int32))
            else:
                places.append(arranged(lax.iota(np.int32, term.size), (term,), points))
        places = [spread(p, [v.size for v in points]) for p in places]
        empty = jnp.zeros([t.size for t in (*leading, *dense)], node.dtype)
        if is_boolean(node.dtype):
            filled = empty.at[tuple(places)].max(rows, mode="drop")
        else:
            filled = empty.at[tuple(places)].add(rows, mode="drop")
        order = [*leading, *dense]
        return lax.transpose(filled, [order.index(t) for t in out])  # type: ignore[arg-type]


def _one_index(indices: list[Idx]) -> Idx | None:
    """The index whose parts stand on the axes, in their order: one, or a quotient and a remainder of one."""
    whole = flatten(indices)
    return whole if isinstance(whole, Idx) else None


def _sides(factors: Sequence[Factor], dense: Sequence[Var]) -> tuple[list[Factor] | None, list[Factor]]:
    """Factors in two groups that share no dense axis, that of the first axis first, or (None, …) for one group only."""
    left: list[Factor] = []
    right: list[Factor] = []
    seen: set[Var] = set()
    for factor in factors:
        mine = {v for v in factor_vars([factor]) if v in dense}
        if (not left and mine) or mine & seen:
            left.append(factor)
            seen |= mine
        else:
            right.append(factor)
    covered = {v for f in right for v in factor_vars([f]) if v in dense}
    if not covered or covered & seen or covered | seen != set(dense):
        return None, []
    return (left, right) if dense[0] in seen else (right, left)

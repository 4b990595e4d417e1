"""Loops over experts, unrolled and scanned, become operations with an expert axis; other programs stay as they are."""

from __future__ import annotations

import itertools

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from moe_xla.passes._jax import source_of
from moe_xla.passes.roll import rolled
from tests.forms.check import quick_jit

TOKENS, WIDTH, HIDDEN, CHOICES = 7, 4, 5, 2
TOLERANCE = 1e-12

pytestmark = pytest.mark.usefixtures("x64")


def _params(experts, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape))

    return {
        "router": normal(WIDTH, experts),
        "w1": normal(experts, WIDTH, HIDDEN),
        "w3": normal(experts, WIDTH, HIDDEN),
        "b1": normal(experts, HIDDEN),
        "b3": normal(experts, HIDDEN),
        "w2": normal(experts, HIDDEN, WIDTH),
        "b2": normal(experts, WIDTH),
    }


def _inputs(experts, seed=0):
    return _params(experts, seed), jnp.asarray(np.random.default_rng(seed + 100).normal(size=(TOKENS, WIDTH)))


def _listed(params):
    """Parameters as a list with the arrays of one expert each."""
    stacked = {k: v for k, v in params.items() if k != "router"}
    experts = params["w1"].shape[0]
    return {"router": params["router"], "experts": [{k: v[e] for k, v in stacked.items()} for e in range(experts)]}


def _top(params, x):
    return lax.top_k(jax.nn.softmax(x @ params["router"]), CHOICES)


def _combine(params, x):
    gates, index = _top(params, x)
    return (jax.nn.one_hot(index, params["router"].shape[1], dtype=x.dtype) * gates[..., None]).sum(1)


def _expert(p, x, activation=jax.nn.silu):
    return activation(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def _gated(p, x):
    return (jax.nn.silu(x @ p["w1"]) * (x @ p["w3"])) @ p["w2"]


def _gated_with_biases(p, x):
    """Two arrays of each shape in one expert, which no sum tells apart."""
    return (jax.nn.silu(x @ p["w1"] + p["b1"]) * (x @ p["w3"] + p["b3"])) @ p["w2"]


def _at(params, e):
    return {k: v[e] for k, v in params.items() if k != "router"}


def _count(params):
    return params["router"].shape[1]


# --- unrolled loops


def unrolled_top_k(params, x):
    gates, index = _top(params, x)
    y = jnp.zeros_like(x)
    for e in range(_count(params)):
        weight = jnp.where(index == e, gates, 0).sum(-1)
        y = y + weight[:, None] * _expert(_at(params, e), x)
    return y


def unrolled_onto_residual(params, x):
    combine = _combine(params, x)
    y = x
    for e in range(_count(params)):
        y = y + combine[:, e, None] * _gated(_at(params, e), x)
    return y


def unrolled_with_two_biases(params, x):
    combine = _combine(params, x)
    y = jnp.zeros_like(x)
    for e in range(_count(params)):
        y = y + combine[:, e, None] * _gated_with_biases(_at(params, e), x)
    return y


def unrolled_by_sum(params, x):
    combine = _combine(params, x)
    return sum(combine[:, e : e + 1] * _expert(_at(params, e), x, jax.nn.relu) for e in range(_count(params)))


def unrolled_top1_where(params, x):
    index = jnp.argmax(x @ params["router"], -1)
    y = jnp.zeros_like(x)
    for e in range(_count(params)):
        y = jnp.where((index == e)[:, None], _expert(_at(params, e), x, jax.nn.gelu), y)
    return y


def unrolled_where_onto_residual(params, x):
    index = jnp.argmax(x @ params["router"], -1)
    y = x * 2
    for e in range(_count(params)):
        y = jnp.where((index == e)[:, None], _gated(_at(params, e), x), y)
    return y


def unrolled_choices(params, x):
    gates, index = _top(params, x)
    y = jnp.zeros_like(x)
    for k in range(CHOICES):
        for e in range(_count(params)):
            weight = jnp.where(index[:, k] == e, gates[:, k], 0)
            y += weight[:, None] * _expert(_at(params, e), x, jax.nn.relu)
    return y


def unrolled_masked_inputs(params, x):
    gates, index = _top(params, x)
    y = jnp.zeros_like(x)
    for e in range(_count(params)):
        mask = (index == e).any(-1)
        y += jnp.where(index == e, gates, 0).sum(-1)[:, None] * _gated(_at(params, e), x * mask[:, None])
    return y


def stacked_outputs(params, x):
    outputs = jnp.stack([_expert(_at(params, e), x) for e in range(_count(params))], axis=1)
    return jnp.einsum("ted,te->td", outputs, _combine(params, x))


def concatenated_outputs(params, x):
    index = jnp.argmax(x @ params["router"], -1)
    outputs = jnp.concatenate([_gated(_at(params, e), x)[None] for e in range(_count(params))])
    return jnp.take_along_axis(outputs, index[None, :, None], 0)[0]


def concatenated_features(params, x):
    outputs = jnp.concatenate([_gated(_at(params, e), x) for e in range(_count(params))], axis=-1)
    return jnp.einsum("ted,te->td", outputs.reshape(TOKENS, -1, WIDTH), _combine(params, x))


def select_between_outputs(params, x):
    index = jnp.argmax(x @ params["router"], -1)
    outputs = [_gated(_at(params, e), x) for e in range(_count(params))]
    return lax.select_n(jnp.broadcast_to(index[:, None], x.shape).astype(jnp.int32), *outputs)


def unstacked_weights(params, x):
    combine = _combine(params, x)
    weights = zip(jnp.unstack(params["w1"]), jnp.unstack(params["w2"]), jnp.unstack(combine, axis=1), strict=True)
    return sum(c[:, None] * (jnp.tanh(x @ w1) @ w2) for w1, w2, c in weights)


@jax.jit
def _jitted_expert(p, x):
    return jax.nn.gelu(_expert(p, x)) * _gated(p, x)


def jitted_experts(params, x):
    combine = _combine(params, x)
    return sum(combine[:, e, None] * _jitted_expert(_at(params, e), x) for e in range(_count(params)))


# --- lists of parameters


def listed(params, x):
    gates, index = _top(params, x)
    y = jnp.zeros_like(x)
    for e, p in enumerate(params["experts"]):
        y = y + jnp.where(index == e, gates, 0).sum(-1)[:, None] * _expert(p, x)
    return y


def listed_gated(params, x):
    combine = _combine(params, x)
    y = x
    for e, p in enumerate(params["experts"]):
        y = y + combine[:, e, None] * _gated({k: v.astype(x.dtype) for k, v in p.items()}, x)
    return y


def listed_with_two_biases(params, x):
    combine = _combine(params, x)
    y = jnp.zeros_like(x)
    for e, p in enumerate(params["experts"]):
        y = y + combine[:, e, None] * _gated_with_biases(p, x)
    return y


def listed_where(params, x):
    index = jnp.argmax(x @ params["router"], -1)
    y = jnp.zeros_like(x)
    for e, p in enumerate(params["experts"]):
        y = jnp.where((index == e)[:, None], _expert(p, x, jax.nn.relu), y)
    return y


def listed_switch(params, x):
    """Branches of a switch under vmap, each with arrays of its own, two of them of one type."""
    gates, index = _top(params, x)
    branches = [lambda h, p=p: _gated(p, h) for p in params["experts"]]
    return jax.vmap(lambda h, i, g: g * lax.switch(i, branches, h))(x, index[:, 0], gates[:, 0])


def switched(params, x):
    gates, index = _top(params, x)
    branches = [lambda h, e=e: _expert(_at(params, e), h) for e in range(_count(params))]
    return jax.vmap(lambda h, i, g: sum(g[k] * lax.switch(i[k], branches, h) for k in range(CHOICES)))(x, index, gates)


def switched_choices(params, x):
    gates, index = _top(params, x)
    branches = [lambda h, e=e: _gated(_at(params, e), h) for e in range(_count(params))]
    out = jax.vmap(lambda h, i: jax.vmap(lambda one: lax.switch(one, branches, h))(i))(x, index)
    return (out * gates[..., None]).sum(1)


# --- scans


def _stacked(params):
    return {k: v for k, v in params.items() if k != "router"}


def scanned_top_k(params, x):
    gates, index = _top(params, x)

    def body(y, given):
        p, e = given
        return y + jnp.where(index == e, gates, 0).sum(-1)[:, None] * _expert(p, x), None

    return lax.scan(body, jnp.zeros_like(x), (_stacked(params), jnp.arange(_count(params))))[0]


def scanned_combine(params, x):
    def body(y, given):
        p, weight = given
        return y + weight[:, None] * _gated(p, x), None

    return lax.scan(body, x, (_stacked(params), _combine(params, x).T))[0]


def scanned_in_reverse(params, x):
    def body(y, given):
        p, weight = given
        return weight[:, None] * _gated(p, x) + y, None

    return lax.scan(body, x, (_stacked(params), _combine(params, x).T), reverse=True)[0]


def scanned_where(params, x):
    index = jnp.argmax(x @ params["router"], -1)

    def body(y, given):
        p, e = given
        return jnp.where((index == e)[:, None], _expert(p, x), y), None

    return lax.scan(body, x, (_stacked(params), jnp.arange(_count(params))))[0]


def scanned_counter(params, x):
    gates, index = _top(params, x)

    def body(carry, p):
        y, e = carry
        weight = jnp.where(index == e, gates, 0).sum(-1)
        return (y + weight[:, None] * _expert(p, x), e + 1), weight

    (y, _), weights = lax.scan(body, (jnp.zeros_like(x), 0), _stacked(params))
    return y * (1 + weights.sum(0)[:, None])


def fori(params, x):
    gates, index = _top(params, x)

    def body(e, y):
        return y + jnp.where(index == e, gates, 0).sum(-1)[:, None] * _expert(_at(params, e), x)

    return lax.fori_loop(0, _count(params), body, jnp.zeros_like(x))


def fori_combine(params, x):
    gates, index = _top(params, x)
    combine = jnp.zeros((TOKENS, _count(params))).at[jnp.arange(TOKENS)[:, None], index].set(gates)

    def body(e, y):
        w1 = jnp.take(params["w1"], e, axis=0)
        return y + combine[:, e][:, None] * (jnp.tanh(x @ w1) @ params["w2"][e])

    return lax.fori_loop(0, _count(params), body, x)


def fori_buffer(params, x):
    combine = _combine(params, x)

    def body(e, y):
        return y.at[e].set(combine[:, e, None] * _gated(_at(params, e), x))

    return lax.fori_loop(0, _count(params), body, jnp.zeros((_count(params), *x.shape))).sum(0)


def mapped(params, x):
    outputs = lax.map(lambda p: _expert(p, x), _stacked(params))
    return jnp.einsum("etd,te->td", outputs, _combine(params, x))


# --- inside of other transformations


def rematerialised(params, x):
    return jax.checkpoint(unrolled_top_k)(params, x) + jax.checkpoint(fori)(params, x)


def within_jit(params, x):
    return jax.jit(unrolled_top1_where)(params, x) * jax.jit(scanned_top_k)(params, x)


def within_layers(params, x):
    return lax.scan(lambda x, _: (x + jnp.tanh(unrolled_top_k(params, x)), None), x, None, length=2)[0]


def within_rematerialised_layers(params, x):
    layer = jax.checkpoint(lambda x, _: (x + jnp.tanh(scanned_top_k(params, x)), None))
    return lax.scan(layer, x, None, length=2)[0]


def within_cond(params, x):
    return lax.cond(x.sum() > 0, unrolled_top_k, scanned_where, params, x)


UNROLLED = (
    unrolled_top_k,
    unrolled_onto_residual,
    unrolled_with_two_biases,
    unrolled_by_sum,
    unrolled_top1_where,
    unrolled_where_onto_residual,
    unrolled_choices,
    unrolled_masked_inputs,
    stacked_outputs,
    concatenated_outputs,
    concatenated_features,
    select_between_outputs,
    unstacked_weights,
    switched,
    switched_choices,
    jitted_experts,
)
LISTED = (listed, listed_gated, listed_with_two_biases, listed_where, listed_switch)
SCANNED = (
    scanned_top_k,
    scanned_combine,
    scanned_in_reverse,
    scanned_where,
    scanned_counter,
    fori,
    fori_combine,
    fori_buffer,
    mapped,
)
WITHIN = (rematerialised, within_jit, within_layers, within_rematerialised_layers, within_cond)


# --- checks


def _gradient(form):
    def loss(params, x):
        y = form(params, x)
        return (jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape) * y + y * y).sum()

    return jax.value_and_grad(loss, argnums=(0, 1))


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _equations(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value):
    return isinstance(value, (jex.core.Jaxpr, jex.core.ClosedJaxpr))


def _number_of(name, closed):
    return sum(eqn.primitive.name == name for eqn in _equations(closed.jaxpr))


def _assert_equal(result, closed, inputs):
    programs = [jex.core.jaxpr_as_fun(c) for c in (result, closed)]
    outputs = quick_jit(lambda *arrays: [run(*arrays) for run in programs])(*jax.tree.leaves(inputs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE), *outputs)


def _given(form, experts):
    params, x = _inputs(experts)
    return (_listed(params), x) if form in LISTED else (params, x)


def _rolled(form, experts, gradient):
    inputs = _given(form, experts)
    closed = jax.make_jaxpr(_gradient(form) if gradient else form)(*inputs)
    return closed, rolled(closed), inputs


each_direction = pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
each_form = pytest.mark.parametrize("form", [*UNROLLED, *LISTED, *SCANNED, *WITHIN])


@each_direction
@each_form
def test_rolled_program_is_equal(form, gradient):
    closed, result, inputs = _rolled(form, 3, gradient)
    assert result is not None
    assert result.in_avals == closed.in_avals
    assert [(a.shape, a.dtype) for a in result.out_avals] == [(a.shape, a.dtype) for a in closed.out_avals]
    _assert_equal(result, closed, inputs)


@each_direction
@each_form
def test_size_does_not_depend_on_the_number_of_experts(form, gradient):
    """Each contraction is there once; of other equations, only entries that are inputs or outputs are one an expert."""
    (_, few, _), (_, many, _) = (_rolled(form, experts, gradient) for experts in (3, 6))
    assert few is not None
    assert many is not None
    assert _number_of("dot_general", few) == _number_of("dot_general", many)
    if form not in (*LISTED, within_layers, within_cond):
        assert len(list(_equations(few.jaxpr))) == len(list(_equations(many.jaxpr)))


@each_direction
@pytest.mark.parametrize("form", SCANNED)
def test_no_scan_is_left(form, gradient):
    _, result, _ = _rolled(form, 3, gradient)
    assert result is not None
    assert not _number_of("scan", result)
    # an expert reads its weights as they are
    assert not _number_of("dynamic_slice", result)
    assert not _number_of("dynamic_update_slice", result)


def test_two_experts():
    for form in (unrolled_top_k, unrolled_top1_where, listed, scanned_top_k, select_between_outputs):
        params, x = _inputs(2)
        if form is select_between_outputs:

            def form(params, x):
                index = jnp.argmax(x @ params["router"], -1).astype(bool)
                outputs = [_gated(_at(params, e), x) for e in range(2)]
                return lax.select_n(jnp.broadcast_to(index[:, None], x.shape), *outputs)

        inputs = (_listed(params), x) if form is listed else (params, x)
        closed = jax.make_jaxpr(_gradient(form))(*inputs)
        result = rolled(closed)
        assert result is not None
        _assert_equal(result, closed, inputs)


def test_source_lines_are_kept():
    closed, result, _ = _rolled(unrolled_top_k, 3, True)
    sources = {source_of(eqn) for eqn in closed.eqns}
    assert result is not None
    dots = [source_of(eqn) for eqn in result.eqns if eqn.primitive.name == "dot_general"]
    assert dots
    assert all("test_roll.py" in source and source in sources for source in dots)


def test_differentiates():
    params, x = _inputs(3)
    closed = jax.make_jaxpr(stacked_outputs)(params, x)
    result = rolled(closed)
    assert result is not None

    def gradient(program):
        return jax.grad(lambda x: jex.core.jaxpr_as_fun(program)(*jax.tree.leaves(params), x)[0].sum())(x)

    np.testing.assert_allclose(gradient(result), gradient(closed), rtol=TOLERANCE, atol=TOLERANCE)


# --- near misses


def accumulated_gradients(params, x):
    """Gradients summed over microbatches: a sum of iterations, but not over experts."""

    def body(total, rows):
        return jax.tree.map(jnp.add, total, jax.grad(lambda p: (jnp.tanh(rows @ p) ** 2).sum())(params["w1"][0])), None

    return lax.scan(body, jnp.zeros_like(params["w1"][0]), x[:, None, :])[0]


def scanned_layers(params, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w1"][:, :, :WIDTH])[0]


def dependent_iterations(params, x):
    for e in range(_count(params)):
        x = x + _gated(_at(params, e), x)
    return x


def dependent_scan(params, x):
    index = jnp.argmax(x @ params["router"], -1)

    def body(y, given):
        p, e = given
        return y + jnp.where((index == e)[:, None], _gated(p, y), 0), None

    return lax.scan(body, x, (_stacked(params), jnp.arange(_count(params))))[0]


def running_maximum(params, x):
    index = jnp.argmax(x @ params["router"], -1)

    def body(y, given):
        p, e = given
        return jnp.maximum(y, jnp.where((index == e)[:, None], _gated(p, x), 0)), None

    return lax.scan(body, x, (_stacked(params), jnp.arange(_count(params))))[0]


def partial_sums(params, x):
    index = jnp.argmax(x @ params["router"], -1)

    def body(y, given):
        p, e = given
        y = y + jnp.where((index == e)[:, None], _gated(p, x), 0)
        return y, y

    return lax.scan(body, x, (_stacked(params), jnp.arange(_count(params))))[1].sum(0)


def mapped_microbatches(params, x):
    return lax.map(lambda rows: _gated(_at(params, 0), rows[None]), x)


def overlapping_scan(params, x):
    _, index = _top(params, x)

    def body(y, given):
        p, e = given
        return jnp.where((index == e).any(-1)[:, None], _gated(p, x), y), None

    return lax.scan(body, x, (_stacked(params), jnp.arange(_count(params))))[0]


def overlapping_rows(params, x):
    index = jnp.argmax(x @ params["router"], -1)

    def body(e, y):
        return y.at[e // 2].add(jnp.where((index == e)[:, None], _gated(_at(params, e), x), 0)).at[0].multiply(2.0)

    return lax.fori_loop(0, _count(params), body, jnp.zeros((_count(params), *x.shape)))


def printed(params, x):
    index = jnp.argmax(x @ params["router"], -1)

    def body(y, given):
        p, e = given
        jax.debug.print("{}", e)
        return y + jnp.where((index == e)[:, None], _gated(p, x), 0), None

    return lax.scan(body, x, (_stacked(params), jnp.arange(_count(params))))[0]


def projections(params, x):
    """Queries, keys and values have weights of one type, and come together by no sum."""
    q, k, v = (x @ params["w1"][i] for i in range(3))
    return jax.nn.softmax(q @ k.T) @ v


@each_direction
@pytest.mark.parametrize(
    "form",
    [
        accumulated_gradients,
        scanned_layers,
        dependent_iterations,
        dependent_scan,
        running_maximum,
        partial_sums,
        mapped_microbatches,
        overlapping_scan,
        overlapping_rows,
    ],
)
def test_stays_as_it_is(form, gradient):
    _, result, _ = _rolled(form, 3, gradient)
    assert result is None


def test_effects_stay():
    _, result, _ = _rolled(printed, 3, False)
    assert result is None


def overlapping_selects(params, x):
    _, index = _top(params, x)
    y = x
    for e in range(_count(params)):
        y = jnp.where((index == e).any(-1)[:, None], _gated(_at(params, e), x), y)
    return y


def with_extra_uses(params, x):
    """Members are read alone, and one expert differs from the others."""
    combine = _combine(params, x)
    outputs = [_expert(_at(params, e), x) for e in range(_count(params))]
    outputs[1] = jnp.tanh(outputs[1])
    y = sum(combine[:, e, None] * o for e, o in enumerate(outputs))
    return y + outputs[0] * outputs[2] + outputs[0].max()


def with_crossed_weights(params, x):
    """Expert e has the weights of another one."""
    combine = _combine(params, x)
    experts = _count(params)
    return sum(combine[:, experts - 1 - e, None] * _gated(_at(params, e), x) for e in range(experts))


def with_some_experts(params, x):
    combine = _combine(params, x)
    y = _expert(_at(params, 0), x)
    for e in range(1, _count(params)):
        y = y + combine[:, e, None] * _gated(_at(params, e), x)
    return y


def with_interaction(params, x):
    """The loss holds the products of the outputs of any two experts."""
    outputs = [_gated(_at(params, e), x) for e in range(_count(params))]
    return sum(a * b for a, b in itertools.combinations(outputs, 2)) + sum(outputs)


PARTLY = (overlapping_selects, with_extra_uses, with_crossed_weights, with_some_experts, with_interaction, projections)


@each_direction
@pytest.mark.parametrize("form", PARTLY)
def test_partly_rolled_is_equal(form, gradient):
    closed, result, inputs = _rolled(form, 4, gradient)
    if result is not None:
        _assert_equal(result, closed, inputs)


@pytest.mark.parametrize("form", [with_extra_uses, with_some_experts])
def test_rest_of_a_loop_is_rolled(form):
    closed, result, _ = _rolled(form, 6, True)
    assert result is not None
    assert _number_of("dot_general", result) < _number_of("dot_general", closed)


# --- random programs


def _random_form(seed):
    """A layer with a loop over experts, made of random parts; some are no loops that can be rolled."""
    rng = np.random.default_rng(seed)

    def pick(*options):
        return options[rng.integers(len(options))]

    activation = pick(jax.nn.relu, jax.nn.silu, jnp.tanh, jax.nn.gelu)
    expert = pick(_gated, lambda p, x: _expert(p, x, activation), lambda p, x: activation(x * 0.5 @ p["w1"]) @ p["w2"])
    loop = pick("unrolled", "listed", "scan", "fori")
    join = pick("add", "add_right", "where", "where_any", "mixed", "square")
    start = pick(jnp.zeros_like, lambda x: x, jnp.sin)
    weighting = pick("combine", "eq", "argmax", "literal")
    order = rng.permutation(4) if pick(True, False) else np.arange(4)

    def form(params, x):
        gates, index = _top(params, x)
        combine = _combine(params, x)

        def step(e, p, y):
            out = expert(p, x)
            mask = index[:, :1] == e if join == "where" else (index == e).any(-1, keepdims=True)
            if join.startswith("where"):
                return jnp.where(mask, out, y)
            if weighting == "literal":
                out = out * (e + 1)
            elif weighting == "eq":
                out = out * jnp.where(index == e, gates, 0).sum(-1)[:, None]
            elif weighting == "argmax":
                out = jnp.where(index[:, :1] == e, gates[:, :1] * out, 0)
            else:
                out = out * (combine[:, e] if loop in ("unrolled", "listed") else jnp.take(combine, e, axis=1))[:, None]
            return {"add": y + out, "add_right": out + y, "mixed": y + out + 0.1 * x, "square": y * y * 0.1 + out}[join]

        y = start(x)
        experts = _count(params)
        if loop == "listed":
            for e, p in enumerate(params["experts"]):
                y = step(e, p, y)
        elif loop == "unrolled":
            for e in order:
                y = step(int(e), _at(params, int(e)), y)
        elif loop == "scan":
            y, _ = lax.scan(lambda y, s: (step(s[1], s[0], y), None), y, (_stacked(params), jnp.arange(experts)))
        else:
            y = lax.fori_loop(0, experts, lambda e, y: step(e, _at(params, e), y), y)
        return y

    return form, loop == "listed"


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_are_equal(seed):
    form, lists = _random_form(seed)
    params, x = _inputs(4, seed)
    inputs = (_listed(params), x) if lists else (params, x)
    closed = jax.make_jaxpr(_gradient(form))(*inputs)
    result = rolled(closed)
    if result is not None:
        _assert_equal(result, closed, inputs)

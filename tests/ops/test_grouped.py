"""Derivatives and transformations of the grouped matmuls, errors, and their form in a jaxpr."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_xla import ops
from moe_xla.ops.backends import BACKENDS
from tests.ops import reference

A, E, K, N = 12, 3, 4, 5
SIZES = np.array([4, 0, 6])  # an empty group, and a tail of two rows


@pytest.fixture
def values():
    rng = np.random.default_rng(1)
    shapes = {"rows": (A, K), "w": (E, K, N), "a": (A, K), "b": (A, N)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_of_first_and_second_order(values, backend, x64):
    dot = functools.partial(ops.grouped_dot, group_sizes=SIZES, backend=backend)

    def f(rows, w, b):
        outer = ops.grouped_outer(rows, b, SIZES, backend=backend)
        return jnp.sin(dot(rows, w)) + jnp.cos(dot(rows, jnp.swapaxes(outer, 1, 2), transpose_w=True))

    args = [values[name].astype(np.float64) for name in ("rows", "w", "b")]
    check_grads(f, args, order=2, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 1, None), (None, None, 0), (1, 2, 0)], ids=str)
def test_vmap(values, axes):
    batch = 3
    rng = np.random.default_rng(2)

    def batched(x, axis):
        if axis is None:
            return x
        stacked = np.stack([x, x[::-1], x // 2]) if x is SIZES else x + rng.normal(size=(batch, *x.shape))
        return np.moveaxis(stacked.astype(x.dtype), 0, axis)

    operands = [batched(x, axis) for x, axis in zip((values["rows"], values["w"], SIZES), axes, strict=True)]

    def loss(rows, w, sizes):
        return jnp.sum(jnp.sin(ops.grouped_dot(rows, w, sizes)))

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1)))
    both = jax.tree.map(np.asarray, jax.jit(jax.vmap(gradient, axes))(*operands))
    for i in range(batch):
        single = [x if axis is None else np.take(x, i, axis) for x, axis in zip(operands, axes, strict=True)]
        expected = gradient(*single)
        chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], both), expected, rtol=1e-5, atol=1e-5)


def test_vmap_of_grouped_outer(values):
    a = jnp.stack([values["a"], 2 * values["a"]])
    out = jax.vmap(lambda a: ops.grouped_outer(a, values["b"], SIZES))(a)
    np.testing.assert_allclose(out[1], 2 * reference.grouped_outer(values["a"], values["b"], SIZES), rtol=1e-5)


def test_forward_mode_linearize_and_hessian_agree(values):
    rows, w = values["rows"], values["w"]

    def loss(w):
        return jnp.sum(jnp.tanh(ops.grouped_dot(rows, w, SIZES)) ** 2)

    tangent = jnp.ones_like(w)
    gradient = jax.grad(loss)(w)
    _, forward = jax.jvp(loss, (w,), (tangent,))
    np.testing.assert_allclose(forward, jnp.vdot(gradient, tangent), rtol=1e-5)
    np.testing.assert_allclose(jax.linearize(loss, w)[1](tangent), forward, rtol=1e-5)
    _, product = jax.jvp(jax.grad(loss), (w,), (tangent,))
    _, other = jax.vjp(jax.grad(loss), w)
    np.testing.assert_allclose(product, other(tangent)[0], rtol=1e-4, atol=1e-5)


def test_scan_checkpoint_and_remat_of_a_scan(values):
    w = jnp.stack([values["w"][:, :, :K]] * 3)

    def loss(rows, w, wrap):
        def block(rows, w):
            return jnp.tanh(ops.grouped_dot(rows, w, SIZES)), None

        return jnp.sum(jax.lax.scan(wrap(block), rows, w)[0])

    plain = jax.value_and_grad(loss, (0, 1))(values["rows"], w, lambda f: f)
    for wrap in (jax.checkpoint, functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)):
        remat = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)(values["rows"], w, wrap)
        chex.assert_trees_all_close(remat, plain, rtol=1e-5, atol=1e-6)


def test_eager_jit_and_disabled_jit_agree(values):
    eager = ops.grouped_dot(values["rows"], values["w"], SIZES)
    with jax.disable_jit():
        disabled = ops.grouped_dot(values["rows"], values["w"], SIZES)
    chex.assert_trees_all_equal(eager, disabled, jax.jit(ops.grouped_dot)(values["rows"], values["w"], SIZES))


def test_shard_map_with_its_check(values):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec("x"), spec()), out_specs=spec("x"))
    def dot(rows, w):
        return ops.grouped_dot(rows, w, SIZES)

    expected = jax.grad(lambda w: jnp.sum(jnp.sin(ops.grouped_dot(values["rows"], w, SIZES))))(values["w"])
    gradient = jax.grad(lambda w: jnp.sum(jnp.sin(dot(values["rows"], w))))(values["w"])
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_dtypes_of_results_and_of_gradients(values):
    rows = values["rows"].astype(jnp.bfloat16)
    out, pullback = jax.vjp(lambda rows, w: ops.grouped_dot(rows, w, SIZES), rows, values["w"])
    assert out.dtype == np.float32
    assert [x.dtype for x in pullback(out)] == [jnp.bfloat16, np.float32]
    narrow = functools.partial(ops.grouped_dot, group_sizes=SIZES, preferred_element_type=np.float32)
    out, pullback = jax.vjp(narrow, rows, values["w"].astype(jnp.bfloat16))
    assert out.dtype == np.float32
    assert [x.dtype for x in pullback(out)] == [jnp.bfloat16, jnp.bfloat16]


def test_the_primitives_stay_visible_in_a_gradient(values):
    loss = lambda rows, w: jnp.sum(ops.grouped_dot(rows, w, SIZES, backend="ragged"))  # noqa: E731
    eqns = jax.make_jaxpr(jax.grad(loss, (0, 1)))(values["rows"], values["w"]).eqns
    found = [(e.primitive, e.params["backend"]) for e in eqns if e.primitive.name.startswith("grouped")]
    assert sorted(str(p) for p, _ in found) == ["grouped_dot", "grouped_dot", "grouped_outer"]
    assert {backend for _, backend in found} == {"ragged"}
    assert {p for p, _ in found} == {ops.grouped_dot_p, ops.grouped_outer_p}


@pytest.mark.parametrize("backend", BACKENDS)
def test_precision_reaches_every_dot(values, backend):
    def loss(rows, w, precision):
        return jnp.sum(ops.grouped_dot(rows, w, SIZES, backend=backend, precision=precision) ** 2)

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    asked = gradient.lower(values["rows"], values["w"], "highest").as_text()
    with jax.default_matmul_precision("highest"):
        default = gradient.lower(values["rows"], values["w"], None).as_text()
    for text in (asked, default):
        dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(dots) == 3
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots)
    assert "HIGHEST" not in gradient.lower(values["rows"], values["w"], None).as_text()


def test_errors_name_argument_value_and_what_is_allowed(values):
    rows, w, a, b = values["rows"], values["w"], values["a"], values["b"]
    cases = [
        (
            TypeError,
            r"rows has dtype int32; allowed are bfloat16, float16",
            lambda: ops.grouped_dot(A * [[1]], w, SIZES),
        ),
        (ValueError, r"rows has shape \(12,\); it must have 2 axes", lambda: ops.grouped_dot(rows[:, 0], w, SIZES)),
        (TypeError, r"rows must be an array, got 'x'", lambda: ops.grouped_dot("x", w, SIZES)),
        (
            ValueError,
            r"last size of rows is 4, but size 2 of w is 5",
            lambda: ops.grouped_dot(rows, w, SIZES, transpose_w=True),
        ),
        (
            ValueError,
            r"leading size of w is 3, but the size of group_sizes is 2",
            lambda: ops.grouped_dot(rows, w, SIZES[:2]),
        ),
        (
            TypeError,
            r"group_sizes has dtype float32; it must be an integer",
            lambda: ops.grouped_dot(rows, w, SIZES * 1.0),
        ),
        (ValueError, r"group_sizes has shape \(1, 3\)", lambda: ops.grouped_dot(rows, w, SIZES[None])),
        (
            ValueError,
            r"backend is 'fast'; allowed are 'auto', 'blocked'",
            lambda: ops.grouped_dot(rows, w, SIZES, backend="fast"),
        ),
        (
            TypeError,
            r"preferred_element_type is int32",
            lambda: ops.grouped_dot(rows, w, SIZES, preferred_element_type="int32"),
        ),
        (
            ValueError,
            r"leading size of a is 12, but the leading size of b is 11",
            lambda: ops.grouped_outer(a, b[1:], SIZES),
        ),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
        with pytest.raises(error, match=message):
            jax.eval_shape(call)

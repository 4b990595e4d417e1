"""`rewrite` of programs without Mixture-of-Experts: nothing that a caller can observe may change."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import moe_xla
from moe_xla.passes import pipeline

X = np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(2, 3)


def loss(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean(hidden**2), {"hidden": hidden}


def params():
    return {"w": jnp.ones((3, 4)) * 0.1, "b": jnp.zeros(4)}


def train_step(state, batch):
    weights, optimizer_state = state
    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(weights, batch)
    updates, optimizer_state = optax.sgd(1e-2, momentum=0.9).update(grads, optimizer_state)
    return (optax.apply_updates(weights, updates), optimizer_state), (value, aux)


def state():
    return params(), optax.sgd(1e-2, momentum=0.9).init(params())


def scanned(x):
    def body(carry, row):
        return carry * 2.0 + row, jnp.where(row > 0, row, carry)

    return jax.lax.scan(jax.checkpoint(body), jnp.zeros(3), x)


def branched(x):
    y = jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
    return jax.lax.while_loop(lambda v: v.sum() < 10, lambda v: v + 1, y)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -0.5, 0.5)


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g * 7.0,))

TABLE = np.arange(12.0, dtype=np.float32).reshape(4, 3)

PROGRAMS = {
    "train_step": (train_step, (state(), X)),
    "scanned": (scanned, (X,)),
    "branched": (branched, (X,)),
    "custom_vjp": (lambda x: jax.grad(lambda v: clipped(v).sum())(x), (X,)),
    "custom_jvp": (lambda x: jax.grad(lambda v: jax.nn.relu(jax.nn.silu(v)).sum())(x), (X,)),
    "constants": (lambda x: x @ jnp.asarray(TABLE).T + jax.nn.one_hot(jnp.array([0, 1]), 4), (X,)),
    "inner_jit": (lambda x: jax.jit(jnp.cumsum, static_argnames="axis")(x, axis=1), (X,)),
    "named_scope": (lambda x: jax.named_call(jnp.sin, name="here")(x) * 2, (X,)),
    "unused_and_forwarded": (lambda x, y, z: (y, y, 3), (X, X, None)),
    "nothing_in": (lambda: jnp.arange(3), ()),
    "key": (lambda key, x: (jax.random.split(key)[0], x), (jax.random.key(0), X)),
    "raw_key": (lambda key: jax.random.split(key), (jax.random.PRNGKey(0),)),
    "integers_and_bools": (lambda i, b: (i + 1, ~b), (np.arange(3, dtype=np.int32), np.array([True, False]))),
    "bfloat16": (lambda x: x * 2, (jnp.ones(3, jnp.bfloat16),)),
    "scalar_scale": (lambda x, scale: (x * scale, scale * 2, scale), (X, 3)),
}


@pytest.fixture(params=PROGRAMS, ids=str)
def program(request):
    return PROGRAMS[request.param]


def test_jaxpr_is_that_of_the_function(program):
    fn, args = program
    assert str(jax.make_jaxpr(moe_xla.rewrite(fn))(*args)) == str(jax.make_jaxpr(fn)(*args))


@pytest.mark.parametrize("outer", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_outputs_trees_dtypes_and_weak_types_are_the_same(program, outer):
    fn, args = program
    expected, actual = outer(fn)(*args), outer(moe_xla.rewrite(fn))(*args)
    chex.assert_trees_all_equal_structs(actual, expected)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(got) == jax.typeof(want)
        if not jnp.issubdtype(jnp.result_type(want), jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=1e-6)


def test_compiled_program_is_that_of_the_function():
    args = (state(), X)
    assert jax.jit(moe_xla.rewrite(train_step)).lower(*args).as_text() == jax.jit(train_step).lower(*args).as_text()


def test_python_numbers_stay_python_numbers_outside_jit():
    seen = moe_xla.rewrite(lambda x, n, mode: (x.sum(), n, jnp.zeros(n), mode))(X, 3, "mean")
    assert seen[1] == 3 and type(seen[1]) is int
    assert seen[2].shape == (3,) and seen[3] == "mean"


def test_untraced_leaf_inside_a_container_is_kept():
    config = {"scale": jnp.float32(2.0), "axis": 1, "name": None}
    out = moe_xla.rewrite(lambda x, config: x.sum(config["axis"]) * config["scale"])(X, config)
    np.testing.assert_allclose(out, X.sum(1) * 2, rtol=1e-6)


def test_untraced_argument_arrives_as_the_same_object():
    marker, seen = object(), []
    moe_xla.rewrite(lambda x, m: seen.append(m) or x)(X, marker)
    assert seen == [marker]


def test_numpy_arrays_of_wide_types_are_canonicalised_as_by_jit():
    out = moe_xla.rewrite(lambda x: x + 1)(np.arange(3, dtype=np.float64))
    assert out.dtype == jnp.float32


def test_keyword_arguments():
    out = moe_xla.rewrite(lambda x, *, scale, shift=1.0: x * scale + shift)(x=jnp.asarray(X), scale=jnp.float32(2))
    np.testing.assert_allclose(out, X * 2 + 1)


def scalar(x):
    return jnp.sum(jnp.sin(x) * x)


@pytest.mark.parametrize(
    "around",
    [
        jax.grad,
        lambda fn: jax.jit(jax.hessian(fn)),
        jax.jit,
        lambda fn: jax.vmap(fn),
        lambda fn: lambda x: jax.jvp(fn, (x,), (x,)),
        lambda fn: lambda x: jax.linearize(fn, x)[1](x),
        lambda fn: lambda x: jax.vjp(fn, x)[1](jnp.float32(1)),
        lambda fn: jax.grad(jax.checkpoint(fn)),
        lambda fn: lambda x: jax.lax.scan(lambda c, row: (c + fn(row), c), jnp.float32(0), x),
        lambda fn: lambda x: jax.lax.map(fn, x),
        lambda fn: jax.jit(jax.vmap(jax.grad(fn))),
        lambda fn: moe_xla.rewrite(fn),
    ],
)
@pytest.mark.parametrize("transform", [moe_xla.rewrite, moe_xla.moe_jit])
def test_composes_with_transformations_around_it(transform, around):
    x = jnp.asarray(X)
    chex.assert_trees_all_close(around(transform(scalar))(x), around(scalar)(x), rtol=1e-5)


@pytest.mark.parametrize("transform", [moe_xla.rewrite, moe_xla.moe_jit])
def test_composes_with_transformations_inside_it(transform):
    def inside(x):
        per_row = jax.vmap(jax.grad(scalar))(x)
        return jax.jvp(jax.jit(scalar), (per_row,), (x,))

    chex.assert_trees_all_close(transform(inside)(X), inside(jnp.asarray(X)), rtol=1e-5)


@pytest.mark.parametrize("transform", [moe_xla.rewrite, moe_xla.moe_jit])
def test_closed_over_tracers(transform):
    def outer(x, y):
        return transform(lambda v: v * y + jnp.sum(y))(x).sum()

    expected = jax.grad(lambda x, y: (x * y + jnp.sum(y)).sum(), argnums=(0, 1))(X, X)
    chex.assert_trees_all_close(jax.grad(outer, argnums=(0, 1))(X, X), expected, rtol=1e-6)
    chex.assert_trees_all_close(jax.jit(jax.grad(outer, argnums=(0, 1)))(X, X), expected, rtol=1e-6)
    chex.assert_trees_all_close(jax.vmap(outer)(X, X), jax.vmap(lambda x, y: (x * y + y.sum()).sum())(X, X), rtol=1e-6)


@pytest.mark.parametrize("transform", [moe_xla.rewrite, moe_xla.moe_jit])
def test_a_closed_over_tracer_returned_as_it_is(transform):
    np.testing.assert_array_equal(jax.jit(lambda y: transform(lambda x: (x, y))(y)[1])(X), X)


@pytest.mark.parametrize("transform", [moe_xla.rewrite, moe_xla.moe_jit])
def test_no_tracer_leaks(transform):
    with jax.checking_leaks():
        jax.block_until_ready(jax.jit(transform(loss))(params(), X))


@pytest.mark.parametrize("transform", [moe_xla.rewrite, moe_xla.moe_jit, lambda fn: jax.jit(moe_xla.rewrite(fn))])
def test_effects_survive(transform, capfd):
    received = []

    def noisy(x):
        jax.debug.print("sum is {}", x.sum())
        jax.debug.callback(lambda v: received.append(("debug", float(v))), x[0, 0])
        token = jax.experimental.io_callback(
            lambda v: received.append(("io", float(v))) or np.float32(v), np.float32(0), x[0, 1], ordered=True
        )
        return x + token

    jax.block_until_ready(transform(noisy)(jnp.ones((2, 3))))
    jax.effects_barrier()
    assert sorted(received) == [("debug", 1.0), ("io", 1.0)]
    assert capfd.readouterr().out.count("sum is 6.0") == 1


def test_names_of_axes_in_vmap_are_seen():
    centred = moe_xla.rewrite(lambda x: x - jax.lax.pmean(x, "batch"))
    np.testing.assert_allclose(jax.vmap(centred, axis_name="batch")(X), X - X.mean(0), atol=1e-6)


def test_inside_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    summed = moe_xla.rewrite(lambda x: jax.lax.psum(x, "data"))
    sharded = jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
    np.testing.assert_array_equal(jax.jit(sharded)(X), X)


def test_under_disable_jit_python_runs_as_written():
    def concrete(x):
        return x + 1 if float(x[0, 0]) < 0 else x

    for transform in (moe_xla.rewrite, moe_xla.moe_jit):
        with jax.disable_jit():
            np.testing.assert_array_equal(transform(concrete)(X), X + 1)


def test_source_lines_are_the_users():
    def here(x):
        return jnp.sin(x)

    text = jax.jit(moe_xla.rewrite(here)).lower(X).as_text(debug_info=True)
    line = here.__code__.co_firstlineno + 1
    assert f'test_rewrite.py":{line}:' in text


def test_errors_in_user_code_name_the_users_arguments():
    def branches(batch):
        return batch if batch["x"][0, 0] > 0 else None

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"branches.*batch\['x'\]|(?s:branches.*batch)"):
        moe_xla.rewrite(branches)({"x": X})


def test_bare_decorator_and_decorator_with_arguments():
    @moe_xla.rewrite
    def bare(x):
        """Adds one."""
        return x + 1

    @moe_xla.rewrite(semantics="exact", strict=False)
    def configured(x):
        """Adds two."""
        return x + 2

    assert (bare.__name__, bare.__doc__, bare.__wrapped__(1)) == ("bare", "Adds one.", 2)
    assert (configured.__name__, configured.__doc__) == ("configured", "Adds two.")
    np.testing.assert_array_equal(configured(bare(X)), X + 1 + 2)


def test_on_methods_partials_and_callable_objects():
    class Model:
        scale = 2.0

        @moe_xla.rewrite
        def apply(self, x):
            return x * self.scale

        def __call__(self, x):
            return x * self.scale

    model = Model()
    np.testing.assert_array_equal(model.apply(X), X * 2)
    np.testing.assert_array_equal(moe_xla.rewrite(model)(X), X * 2)
    np.testing.assert_array_equal(moe_xla.rewrite(model.apply)(X), X * 2)
    partial = moe_xla.rewrite(functools.partial(jnp.sum, axis=1))
    assert partial.__name__ == "sum"
    np.testing.assert_allclose(partial(X), X.sum(1), rtol=1e-6)


def test_traces_once_per_call_and_once_under_jit():
    @chex.assert_max_traces(n=1)
    def once(x):
        return x + 1

    chex.clear_trace_counter()
    step = jax.jit(moe_xla.rewrite(once))
    step(X), step(X), jax.jit(step)(X)


def test_a_rewritten_program_is_what_runs(passes_find, rewritten_site):
    passes_find(rewritten_site, shift=1.0)
    np.testing.assert_array_equal(moe_xla.rewrite(lambda x: x)(X), X + 1)
    np.testing.assert_array_equal(moe_xla.moe_jit(lambda x: x)(X), X + 1)


def test_options_reach_the_passes(passes_find):
    passes_find()
    moe_xla.rewrite(lambda x: x, semantics="exact", patterns=(), backend="ragged")(X)
    (options,) = passes_find.options
    assert (options.semantics, options.patterns, options.backend) == ("exact", frozenset(), "ragged")


def test_weak_types_that_the_passes_lose_are_restored(monkeypatch):
    def rewrite_jaxpr(closed, options):
        return pipeline.Rewritten(lambda x, key: [jnp.float32(6.0), x * 3.0, key], ())

    monkeypatch.setattr(pipeline, "rewrite_jaxpr", rewrite_jaxpr)
    weak, strong, key = jax.jit(moe_xla.rewrite(lambda x, k: (x * 3.0, jnp.float32(x), k)))(2.0, jax.random.key(0))
    assert (weak.weak_type, strong.weak_type) == (True, False) and weak == strong == 6.0
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)

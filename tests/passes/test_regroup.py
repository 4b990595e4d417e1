"""Layers written with `jax.lax.ragged_dot` get another backend, wherever they stand; whatever else there is stays."""

from __future__ import annotations

import functools

import chex
import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moe_xla
from moe_xla import ops
from moe_xla.passes.regroup import regrouped
from tests.forms.check import assert_close, quick_jit

ROWS, MODEL, HIDDEN, EXPERTS, CHOICES = 12, 4, 5, 3, 2
TOLERANCE = {"float32": 3e-5, "float64": 1e-12}

pytestmark = pytest.mark.usefixtures("x64")
each_dtype = pytest.mark.parametrize("dtype", ["float32", "float64"])


def _params(dtype="float64", experts=EXPERTS, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"router": (MODEL, experts), "up": (experts, MODEL, HIDDEN), "down": (experts, HIDDEN, MODEL)}
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def _x(dtype="float64", seed=1, shape=(ROWS, MODEL)):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


SIZES = jnp.array([5, 0, 4], jnp.int32)  # an empty group, and a tail


def names(jaxpr):
    """The primitives of a jaxpr and of its bodies."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jex.core.jaxprs_in_params(eqn.params):
            yield from names(inner)


def _count(jaxpr, name):
    return sum(n == name for n in names(jaxpr))


def experts(params, rows, sizes=SIZES):
    return lax.ragged_dot(jax.nn.silu(lax.ragged_dot(rows, params["up"], sizes)), params["down"], sizes)


def layer(params, x):
    """A whole layer as it is written by hand."""
    gates, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), CHOICES)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=params["router"].shape[1])
    rows = experts(params, x[order // CHOICES], sizes)
    return jnp.einsum("tk,tkd->td", gates, rows[jnp.argsort(order)].reshape(*gates.shape, -1))


def naive_layer(params, x):
    gates, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), CHOICES)
    weight = (jax.nn.one_hot(chosen, params["router"].shape[1], dtype=x.dtype) * gates[..., None]).sum(1)
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, params["up"]))
    return jnp.einsum("tef,efd,te->td", hidden, params["down"], weight)


# --- programs: (params, x) -> array


def jitted(params, x):
    return jax.jit(experts)(params, x)


def shared_body(params, x):
    matmul = jax.jit(lambda rows, w: lax.ragged_dot(rows, w, SIZES))
    return matmul(jnp.tanh(matmul(x, params["up"])) @ params["up"][0].T, params["up"])


def scanned(params, x):
    return lax.scan(lambda x, _: (x + layer(params, x), x.sum()), x, None, length=3)[0]


def scanned_weights(params, x):
    stacked = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    return lax.scan(lambda x, p: (x + layer(p, x), None), x, stacked)[0]


def rematerialised(params, x):
    return jax.checkpoint(layer)(params, x)


def rematerialised_saving_dots(params, x):
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(params, x)


def scanned_rematerialised(params, x):
    return lax.scan(jax.checkpoint(lambda x, _: (x + layer(params, x), None)), x, None, length=2)[0]


def vmapped_by_axis(params, x):
    """All operands batched: the only `vmap` of a ragged dot that jax has."""
    both = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    return jax.vmap(experts)(both, x.reshape(2, ROWS // 2, MODEL), jnp.array([[2, 1, 2], [0, 6, 0]]))


def branched(params, x):
    return lax.cond(x.sum() > 0, layer, lambda params, x: 2 * layer(params, x), params, x)


@jax.custom_vjp
def _with_rule(params, x):
    return layer(params, x)


def _forward(params, x):
    y, pull = jax.vjp(layer, params, x)
    return y, pull


_with_rule.defvjp(_forward, lambda pull, ct: pull(2 * ct))


def custom_vjp(params, x):
    return _with_rule(params, x)


@jax.custom_jvp
def _with_tangents(params, x):
    return layer(params, x)


@_with_tangents.defjvp
def _tangents(primals, tangents):
    y, dy = jax.jvp(layer, primals, tangents)
    return y, 3 * dy


def custom_jvp(params, x):
    return _with_tangents(params, x)


def one_expert_weights_transposed(params, x):
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(lax.ragged_dot(x, params["up"], SIZES), params["up"], SIZES, numbers)


def beside_a_naive_layer(params, x):
    return layer(params, x + naive_layer(params, x))


def _on_devices(layer, params, x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(layer, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))(params, x)


def sharded(params, x):
    def narrow(params, x):
        chosen = jnp.argmax(x @ params["router"], 1)
        return experts(params, x[jnp.argsort(chosen)], jnp.bincount(chosen, length=EXPERTS).astype("int32"))

    return _on_devices(narrow, params, x)


PROGRAMS = (
    experts, layer, jitted, shared_body, scanned, scanned_weights, rematerialised, rematerialised_saving_dots,
    scanned_rematerialised, vmapped_by_axis, branched, custom_vjp, custom_jvp,
    one_expert_weights_transposed, beside_a_naive_layer, sharded,
)  # fmt: skip
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)


def _value_and_grad(program):
    return jax.value_and_grad(lambda params, x: jnp.sum(jnp.sin(program(params, x))), (0, 1))


def _assert_close(actual, expected, dtype="float64"):
    assert_close(actual, expected, TOLERANCE[dtype])


def _regrouped(fn, *args, backend="auto"):
    return regrouped(jax.make_jaxpr(fn)(*args), backend)


@each_dtype
@each_program
def test_value_and_gradients_are_those_of_the_program_as_written(program, dtype):
    step, args = _value_and_grad(program), (_params(dtype), _x(dtype))
    closed = jax.make_jaxpr(step)(*args)
    result = regrouped(closed, "auto")
    before, after = _count(closed.jaxpr, "ragged_dot_general"), result.closed.jaxpr
    assert before and not _count(after, "ragged_dot_general")
    assert _count(after, "grouped_dot") + _count(after, "grouped_outer") == before
    assert {s.status for s in result.sites} == {"rewritten"}
    _assert_close(quick_jit(moe_xla.rewrite(step))(*args), quick_jit(step)(*args), dtype)


@each_program
def test_the_rewritten_program_can_be_differentiated(program):
    args = _params(), _x()
    _assert_close(*(quick_jit(_value_and_grad(f))(*args) for f in (moe_xla.rewrite(program), program)))


def test_vmap_around_the_rewritten_program_takes_any_axis():
    x = _x(shape=(ROWS, 2, MODEL))
    batched = jax.vmap(moe_xla.rewrite(layer), (None, 1), 1)(_params(), x)
    _assert_close(batched, jnp.stack([layer(_params(), x[:, i]) for i in range(2)], 1))


def looped(params, x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + layer(params, s[1])), (0, x))[1]


def test_values_of_a_while_loop():
    args = _params(), _x()
    assert not _count(_regrouped(looped, *args).closed.jaxpr, "ragged_dot_general")
    _assert_close(quick_jit(moe_xla.rewrite(looped))(*args), quick_jit(looped)(*args))


def test_nested_vmap_which_jax_itself_does_not_compile():
    four = jax.tree.map(lambda p: jnp.stack([p, 2 * p, 3 * p, 4 * p]), _params())
    x, sizes = _x().reshape(4, ROWS // 4, MODEL), jnp.array([[2, 0, 1], [0, 3, 0], [1, 1, 1], [1, 0, 0]])
    step = jax.vmap(jax.value_and_grad(lambda params, x, sizes: jnp.sin(experts(params, x, sizes)).sum()))
    nested = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), (four, x, sizes))
    actual = quick_jit(moe_xla.rewrite(jax.vmap(step)))(*nested)
    _assert_close(actual, jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), quick_jit(step)(four, x, sizes)))


@pytest.mark.parametrize("size_dtype", ["int32", "uint8", "uint32", "int64"])
def test_tails_and_sums_beyond_the_rows(size_dtype):
    @quick_jit
    def rewritten_and_written(sizes):
        step = _value_and_grad(functools.partial(experts, sizes=sizes))
        args = _params(), _x()
        return moe_xla.rewrite(step)(*args), step(*args), moe_xla.rewrite(experts)(*args, sizes)

    for sizes in ([5, 0, 4], [0, 0, 0], [0, 12, 0], [12, 0, 0], [7, 9, 3], [20, 20, 20], [4, 4, 4]):
        actual, expected, y = rewritten_and_written(jnp.array(sizes, size_dtype))
        _assert_close(actual, expected)
        assert not jnp.any(y[min(ROWS, sum(sizes)) :])


def test_a_size_that_int32_does_not_hold_takes_all_rows():
    sizes = jnp.array([2, 2**40, 5])
    _assert_close(moe_xla.rewrite(experts)(_params(), _x(), sizes), experts(_params(), _x(), sizes))


def test_a_nan_in_the_tail_goes_nowhere():
    x = _x().at[-1].set(jnp.nan)
    step = jax.value_and_grad(lambda p: experts(p, x).sum())
    _assert_close(moe_xla.rewrite(step)(_params()), step(_params()))


def test_a_nan_in_the_weights_of_an_expert_reaches_its_rows_only():
    params, x = _params(), _x()
    poisoned = {**params, "up": params["up"].at[2].set(jnp.nan)}
    step = jax.value_and_grad(lambda p: jnp.sum(experts(p, x)[:5] ** 2))
    assert jnp.isnan(step(poisoned)[0])
    loss, grads = moe_xla.rewrite(step)(poisoned)
    expected_loss, expected = step(params)
    _assert_close((loss, grads["down"][0]), (expected_loss, expected["down"][0]))
    y = moe_xla.rewrite(experts)(poisoned, x)
    np.testing.assert_array_equal(jnp.isnan(y).any(1), (np.arange(ROWS) >= 5) & (np.arange(ROWS) < 9))


@pytest.mark.parametrize("preferred", [None, "float32", "bfloat16"])
def test_the_type_of_the_result_is_kept(preferred):
    args = _x("bfloat16"), _params("bfloat16")["up"], SIZES
    dot = functools.partial(lax.ragged_dot, preferred_element_type=preferred)
    actual, expected = moe_xla.rewrite(dot)(*args), dot(*args)
    assert not _count(_regrouped(dot, *args).closed.jaxpr, "ragged_dot_general")
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(*(y.astype("float32") for y in (actual, expected)), rtol=2**-7, atol=2**-7)


def test_the_precision_and_the_backend_asked_for_are_those_of_the_new_equations():
    dot = functools.partial(lax.ragged_dot, precision=("highest", "default"))
    (eqn,) = _regrouped(dot, _x(), _params()["up"], SIZES, backend="blocked").closed.jaxpr.eqns
    assert eqn.params["precision"] == (lax.Precision.HIGHEST, lax.Precision.DEFAULT)
    assert eqn.params["backend"] == "blocked"


def test_lines_and_scopes_stay():
    def program(params, x):
        with jax.named_scope("experts"):
            return experts(params, x)

    closed = jax.make_jaxpr(program)(_params(), _x())
    old = [e.source_info for e in closed.jaxpr.eqns]
    assert [e.source_info for e in regrouped(closed, "auto").closed.jaxpr.eqns] == old


def test_a_checkpoint_stays_with_its_policy():
    policy = jax.checkpoint_policies.dots_saveable
    closed = jax.make_jaxpr(jax.checkpoint(layer, policy=policy))(_params(), _x())
    (eqn,) = regrouped(closed, "auto").closed.jaxpr.eqns
    assert eqn.primitive is closed.jaxpr.eqns[0].primitive and eqn.params["policy"] is policy
    assert _count(eqn.params["jaxpr"], "grouped_dot") == 2


def test_a_custom_rule_stays():
    step = jax.grad(lambda params: moe_xla.rewrite(custom_vjp)(params, _x()).sum())
    _assert_close(step(_params()), jax.grad(lambda params: 2 * layer(params, _x()).sum())(_params()))


def test_a_body_that_equations_share_stays_shared():
    closed = jax.make_jaxpr(shared_body)(_params(), jnp.ones((ROWS, MODEL)))
    result = regrouped(closed, "auto").closed

    def bodies(jaxpr):
        calls = [e for e in jaxpr.eqns if e.primitive.name in ("jit", "pjit") and e.params["name"] == "<lambda>"]
        return [getattr(e.params["jaxpr"], "jaxpr", e.params["jaxpr"]) for e in calls]

    first, second = bodies(closed.jaxpr)
    assert first is second
    first, second = bodies(result.jaxpr)
    assert first is second and _count(first, "grouped_dot") == 1


# --- what stays as it is written


def _transposed_rows(params, x):
    numbers = lax.RaggedDotDimensionNumbers((((0,), (1,)), ((), ())), [1], [0])
    return lax.ragged_dot_general(x.T, params["up"], SIZES, numbers)


def _grouped_batch(params, x):
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), [0], [])
    return lax.ragged_dot_general(x.reshape(3, 4, MODEL), params["up"], jnp.array([2, 1]), numbers)


def _integers(params, x):
    return lax.ragged_dot(x.astype("int32"), params["up"].astype("int32"), SIZES)


def _complex(params, x):
    return lax.ragged_dot(x + 1j, params["up"] + 0j, SIZES)


def _wide_result(params, x):
    return lax.ragged_dot(x.astype("float32"), params["up"].astype("float32"), SIZES, preferred_element_type="float64")


def _algorithm(params, x):
    return lax.ragged_dot(
        x.astype("float32"), params["up"].astype("float32"), SIZES, precision=lax.DotAlgorithmPreset.F32_F32_F32
    )


def _sharded_with_long_sizes(params, x):
    return _on_devices(layer, params, x)


def _policy_on_ragged_dot(params, x):
    def policy(primitive, *_, **__):
        return primitive.name == "ragged_dot_general"

    return jax.checkpoint(experts, policy=policy)(params, x)


KEPT = {
    _transposed_rows: "axes are not laid out",
    _grouped_batch: "axes are not laid out",
    _integers: "not int32",
    _complex: "not complex128",
    _wide_result: "the result is float64",
    _sharded_with_long_sizes: "inside a shard_map are int64",
    _algorithm: "is an algorithm",
    _policy_on_ragged_dot: "policy of a checkpoint",
}


@pytest.mark.parametrize("program", KEPT, ids=lambda p: p.__name__)
def test_a_near_miss_is_the_very_same_program(program):
    args = _params(), _x()
    closed = jax.make_jaxpr(program)(*args)
    result = regrouped(closed, "auto")
    assert result.closed is closed
    assert {s.status for s in result.sites} == {"kept"} and KEPT[program] in result.sites[0].reason
    chex.assert_trees_all_equal(quick_jit(moe_xla.rewrite(program))(*args), quick_jit(program)(*args))


@pytest.mark.parametrize("spec", [P(), P("i")], ids=str)
def test_a_result_on_an_explicit_mesh_stays(spec):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        closed = jax.make_jaxpr(lambda params, x: lax.ragged_dot(x, params["up"], SIZES, out_sharding=spec))(
            _params(), _x()
        )
        result = regrouped(closed, "auto")
    assert result.closed is closed
    assert "the result is laid out as" in result.sites[0].reason


def test_without_ragged_dots_the_program_is_the_very_same():
    closed = jax.make_jaxpr(_value_and_grad(naive_layer))(_params(), _x())
    result = regrouped(closed, "auto")
    assert result.closed is closed and not result.sites


def test_where_the_backend_is_the_ragged_dot_of_jax_the_program_is_the_very_same(monkeypatch):
    closed = jax.make_jaxpr(_value_and_grad(layer))(_params(), _x())
    chosen = regrouped(closed, "ragged")
    monkeypatch.setattr(ops, "default_platform", lambda: "tpu")
    native = regrouped(closed, "auto")
    for result, platform in ((chosen, "cpu"), (native, "tpu")):
        assert result.closed is closed
        (site,) = result.sites
        assert site.reason == f"the backend chosen for {platform} is jax.lax.ragged_dot itself"


def test_only_what_can_be_replaced_is():
    def program(params, x):
        return experts(params, x).sum() + _integers(params, x).sum()

    result = _regrouped(program, _params(), _x())
    assert [s.status for s in result.sites] == ["rewritten", "kept"]
    assert _count(result.closed.jaxpr, "ragged_dot_general") == 1


def test_an_equation_that_one_place_keeps_stays_everywhere():
    body = jax.jit(experts)

    def program(params, x):
        policy = lambda primitive, *_, **__: primitive.name == "ragged_dot_general"  # noqa: E731
        return body(params, x) + jax.checkpoint(body, policy=policy)(params, x)

    result = _regrouped(program, _params(), _x())
    assert {s.status for s in result.sites} == {"kept"}
    assert _count(result.closed.jaxpr, "ragged_dot_general") == 4


def test_a_pattern_that_is_not_wanted_is_not_looked_for():
    step = moe_xla.moe_jit(_value_and_grad(layer), patterns=["einsum_dispatch"])
    assert not step.explain(_params(), _x()).sites
    assert "grouped_dot" not in str(step.trace(_params(), _x()).jaxpr)


def test_our_own_operations_are_none_of_these():
    def program(params, x):
        return ops.grouped_dot(x, params["up"], SIZES, backend="ragged")

    assert not moe_xla.moe_jit(program, patterns=["ragged_dot"]).explain(_params(), _x()).sites


# --- what the report says


def _sites(program, *args, **options):
    return moe_xla.moe_jit(program, **options).explain(*(args or (_params(), _x()))).sites


def _flops(rows, layers):
    return layers * 2 * rows * MODEL * HIDDEN


def test_a_layer_is_one_site_forward_and_backward():
    (site,) = _sites(_value_and_grad(layer))
    rows = ROWS * CHOICES
    assert (site.status, site.pattern, site.semantics, site.backend) == (
        "rewritten", "ragged_dot", "dropless", "blocked",
    )  # fmt: skip
    assert (site.tokens, site.experts, site.choices, site.capacity) == (rows, EXPERTS, 1, None)
    assert site.useful_flops == _flops(rows, 6) and site.naive_flops == EXPERTS * site.useful_flops
    # Up and its rows' gradient, down and its; both sides of the gradients of the weights.
    assert site.removed_bytes == 8 * EXPERTS * rows * 4 * (MODEL + HIDDEN)
    assert "test_regroup.py" in site.source and "(experts)" in site.source


@pytest.mark.parametrize(
    ("program", "count", "runs"),
    [(scanned, 1, 3 * 6), (scanned_rematerialised, 1, 2 * 8), (rematerialised, 1, 8), (custom_vjp, 1, 6)],
    ids=lambda p: getattr(p, "__name__", p),
)
def test_a_layer_in_two_bodies_is_one_site(program, count, runs):
    sites = _sites(_value_and_grad(program))
    assert len(sites) == count
    assert sum(s.useful_flops for s in sites) == _flops(ROWS * CHOICES, runs)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit], ids=["plain", "checkpoint", "jit"])
def test_the_layers_of_an_unrolled_loop_are_sites_of_their_own(wrap):
    def program(params, x):
        for _ in range(3):
            x = x + wrap(layer)(params, x)
        return x

    sites = _sites(_value_and_grad(program))
    assert len(sites) == 3 and len({s.source for s in sites}) == 1
    assert len({s.useful_flops for s in sites}) == 1


def test_the_semantics_asked_for_are_met():
    report = moe_xla.moe_jit(layer, semantics="exact", strict=True).explain(_params(), _x())
    assert not report.unmet() and report.sites[0].semantics == "exact"


def test_the_report_names_what_stays_and_why():
    report = moe_xla.moe_jit(_integers).explain(_params(), _x())
    assert "kept" in str(report) and "(ragged_dot_general at" in str(report)
    with pytest.raises(moe_xla.RewriteError, match="not int32"):
        moe_xla.rewrite(_integers, strict=True)(_params(), _x())


@pytest.mark.parametrize("semantics", ["dropless", "exact"])
def test_a_naive_layer_beside_it_is_rewritten_too(semantics):
    step = _value_and_grad(beside_a_naive_layer)
    sites = _sites(step, semantics=semantics, strict=True)
    assert sorted(s.pattern for s in sites) == ["dense_experts", "ragged_dot"]
    program = moe_xla.moe_jit(step, semantics=semantics, strict=True)
    _assert_close(program(_params(), _x()), jax.jit(step)(_params(), _x()))

"""`moe_jit` behaves as `jax.jit` does: caching, donation, shardings, static arguments, AOT; and explains itself."""

import functools
import gc
import inspect
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla
from moe_xla.passes._jax import source_of

X = np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(2, 3)
ABSTRACT = jax.ShapeDtypeStruct(X.shape, X.dtype)


@pytest.fixture(autouse=True)
def fresh_trace_counts():
    chex.clear_trace_counter()


def counted(fn, traces):
    """`fn`, which fails when it is traced more than `traces` times."""
    return chex.assert_max_traces(fn, n=traces)


def test_jaxpr_is_that_of_jit():
    def fn(x):
        return {"sum": jnp.sum(jnp.where(x > 0, x, 0.0)), "two": 2}

    assert str(jax.make_jaxpr(moe_xla.moe_jit(fn))(X)) == str(jax.make_jaxpr(jax.jit(fn))(X))
    assert moe_xla.moe_jit(fn).lower(X).as_text() == jax.jit(fn).lower(X).as_text()


def test_body_runs_once_per_signature():
    step = moe_xla.moe_jit(counted(lambda x, y: x + y, 3))
    for _ in range(2):
        step(X, X)
        step(X, 1)
        step(X[:1], X[:1])
    with pytest.raises(AssertionError):
        step(X[:, :2], X[:, :2])


@pytest.mark.parametrize(
    "order", [["call", "explain", "lower"], ["explain", "lower", "call"], ["lower", "call", "explain"]]
)
def test_call_lower_and_explain_share_one_trace(order, passes_find, rewritten_site):
    passes_find(rewritten_site)
    step = moe_xla.moe_jit(counted(lambda x, scale: x * scale, 1), static_argnames="scale")
    do = {
        "call": lambda: step(X, scale=2),
        "explain": lambda: step.explain(X, scale=2),
        "lower": lambda: step.lower(ABSTRACT, scale=2).compile(),
    }
    for name in order + order:
        do[name]()
    assert len(passes_find.options) == 1
    assert step.explain(ABSTRACT, scale=2).sites == (rewritten_site,)


def test_functions_made_of_one_function_share_its_traces(passes_find, rewritten_site):
    passes_find(rewritten_site)
    fn = counted(lambda x: x + 1, 2)
    for _ in range(3):
        moe_xla.moe_jit(fn)(X)
        moe_xla.moe_jit(fn, semantics="exact")(X)
    assert moe_xla.moe_jit(fn, donate_argnums=0).explain(X).sites == (rewritten_site,)


def test_equal_functions_that_differ_are_told_apart():
    class Add:
        def __init__(self, n):
            self.n = n

        def __call__(self, x):
            return x + self.n

        def __eq__(self, other):
            return isinstance(other, Add)

        def __hash__(self):
            return 0

    first, second = moe_xla.moe_jit(Add(1)), moe_xla.moe_jit(Add(2))
    assert (first(1), second(1), first(1.0)) == (2, 3, 2.0)


def test_functions_without_hash_or_weak_references():
    class Slots:
        __slots__ = ()
        __hash__ = None

        def __call__(self, x):
            return x + 1

    assert moe_xla.moe_jit(Slots()).explain(1).sites == ()


def test_a_function_is_freed_with_its_traces():
    def fn(x):
        return x + 1

    moe_xla.moe_jit(fn)(X)
    alive = weakref.ref(fn)
    del fn
    gc.collect()
    assert alive() is None


def test_grad_and_vmap_around_trace_once():
    step = moe_xla.moe_jit(counted(lambda x: jnp.sum(jnp.sin(x)), 2))
    for _ in range(2):
        jax.grad(step)(X)
        jax.vmap(step)(X)


def test_explain_runs_and_compiles_nothing(passes_find, kept_site):
    passes_find(kept_site)
    ran = []
    step = moe_xla.moe_jit(lambda x: jax.debug.callback(lambda: ran.append(1)) or x, donate_argnums=0)
    x = jnp.asarray(X)
    report = step.explain(x)
    jax.effects_barrier()
    assert report.sites == (kept_site,) and not ran and not x.is_deleted()
    assert isinstance(report, moe_xla.Report) and report.function == "<lambda>" and report.semantics == "dropless"


def test_explain_tells_signatures_and_static_values_apart(passes_find, rewritten_site, kept_site):
    step = moe_xla.moe_jit(lambda x, mode: x, static_argnums=1)
    passes_find(rewritten_site)
    step(X, "a"), step(X, None)
    passes_find(kept_site)
    step(X, "b"), step(X[0], "a")
    sites = [step.explain(*args).sites[0].status for args in ((X, "a"), (X, None), (X, "b"), (X[0], "a"))]
    assert sites == ["rewritten", "rewritten", "kept", "kept"]


def test_explain_under_disable_jit(passes_find, kept_site):
    passes_find(kept_site)
    with jax.disable_jit():
        assert moe_xla.moe_jit(lambda x: x).explain(X).sites == (kept_site,)


def test_explain_after_clear_cache_traces_again(passes_find, kept_site):
    passes_find(kept_site)
    step = moe_xla.moe_jit(counted(lambda x: x, 2))
    step(X)
    step.clear_cache()
    assert step.explain(X).sites == (kept_site,)
    step(X)


def test_aot_stages():
    step = moe_xla.moe_jit(lambda x, y=None: {"out": x + 1})
    assert step.eval_shape(ABSTRACT) == {"out": jax.ShapeDtypeStruct(X.shape, jnp.float32)}
    assert isinstance(step.trace(ABSTRACT), jax.stages.Traced)
    compiled = step.lower(ABSTRACT).compile()
    assert "HloModule" in compiled.as_text()
    np.testing.assert_array_equal(compiled(X)["out"], X + 1)


def test_module_is_named_after_the_function():
    def train_step(x):
        return x

    for fn in (train_step, functools.partial(train_step), moe_xla.rewrite(train_step)):
        assert "module @jit_train_step" in moe_xla.moe_jit(fn).lower(X).as_text()


@pytest.mark.parametrize("how", [{"donate_argnums": 0}, {"donate_argnums": (0,)}, {"donate_argnames": "state"}])
def test_donation_is_honoured(how):
    step = moe_xla.moe_jit(lambda state, x: ({"w": state["w"] + x}, x.sum()), **how)
    state, x = {"w": jnp.zeros((2, 3))}, jnp.asarray(X)
    new_state, _ = step(state, x)
    assert state["w"].is_deleted() and not x.is_deleted()
    np.testing.assert_array_equal(new_state["w"], X)


def test_shardings():
    mesh = jax.make_mesh((1,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    step = moe_xla.moe_jit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding)
    assert step(X).sharding == sharding


def test_inline_keep_unused_and_compiler_options_reach_jit():
    def first(x, y):
        return x + 1

    for how in ({"inline": True}, {"keep_unused": True}):
        step, jitted = moe_xla.moe_jit(first, **how), jax.jit(first, **how)
        assert str(jax.make_jaxpr(step)(X, X)) == str(jax.make_jaxpr(jitted)(X, X))
        assert step.lower(X, X).as_text() == jitted.lower(X, X).as_text()
    with pytest.raises(Exception, match="no_such_option"):
        moe_xla.moe_jit(first, compiler_options={"no_such_option": True})(X, X)


@pytest.mark.parametrize(
    "how, args, kwargs",
    [
        ({"static_argnums": 1}, (X, 3), {}),
        ({"static_argnums": (1,)}, (X,), {"n": 3}),
        ({"static_argnums": -1}, (X, 3), {}),
        ({"static_argnames": "n"}, (X, 3), {}),
        ({"static_argnames": ("n",)}, (X,), {"n": 3}),
    ],
)
def test_static_arguments_reach_the_function_as_python_values(how, args, kwargs):
    def fn(x, n):
        assert type(n) is int and isinstance(x, jax.core.Tracer)
        return jnp.tile(x, n)

    step = moe_xla.moe_jit(fn, **how)
    np.testing.assert_array_equal(step(*args, **kwargs), np.tile(X, 3))
    assert step.explain(*args, **kwargs).sites == ()
    assert step.eval_shape(*args, **kwargs).shape == (2, 9)


def test_static_containers_and_numpy_scalars_are_not_traced():
    def fn(x, sizes, size):
        assert sizes == (2, (3, "wrap")) and type(size) is np.int32
        return jnp.pad(x, sizes[0], mode=sizes[1][1]) + jnp.zeros(int(size))

    step = moe_xla.moe_jit(fn, static_argnums=(1, 2))
    expected = np.pad(X, 2, mode="wrap")
    np.testing.assert_allclose(step(X, (2, (3, "wrap")), np.int32(7)), expected)


def test_dynamic_python_scalars_are_traced_and_weak():
    def fn(x, scale):
        assert isinstance(scale, jax.core.Tracer)
        return x * scale, scale + 1

    step = moe_xla.moe_jit(counted(fn, 1))
    half = jnp.ones(2, jnp.bfloat16)
    for scale in (2.0, 3.0):
        scaled, weak = step(half, scale)
    assert scaled.dtype == jnp.bfloat16 and weak.weak_type and weak == 4.0


def test_none_and_empty_containers():
    step = moe_xla.moe_jit(lambda x, mask, rest: (x, mask, rest, []))
    out = step(X, None, {"empty": ()})
    assert out[1] is None and out[2] == {"empty": ()} and out[3] == []
    assert step.explain(X, None, {"empty": ()}).sites == ()


def test_keys_and_variadic_arguments():
    step = moe_xla.moe_jit(lambda key, *xs, **named: jax.random.normal(key, ()) + sum(xs) + named["b"] - named["a"])
    key = jax.random.key(1)
    np.testing.assert_allclose(step(key, 1.0, 2.0, b=4.0, a=1.0), jax.random.normal(key, ()) + 6.0)


def test_decorator_forms():
    @moe_xla.moe_jit
    def bare(x):
        """Adds one."""
        return x + 1

    @moe_xla.moe_jit(semantics="exact", static_argnames="n")
    def configured(x, n):
        """Repeats."""
        return jnp.tile(x, n)

    assert (bare.__name__, bare.__doc__, bare.__wrapped__(1)) == ("bare", "Adds one.", 2)
    assert (configured.__name__, configured.__doc__) == ("configured", "Repeats.")
    assert list(inspect.signature(configured).parameters) == ["x", "n"]
    np.testing.assert_array_equal(configured(bare(X), n=2), np.tile(X + 1, 2))
    assert configured.explain(X, 2).semantics == "exact"


def test_attributes_of_the_function_are_kept():
    def fn(x):
        return x

    fn.version, fn.lower = 3, "an attribute that moe_jit must not take over"
    step = moe_xla.moe_jit(fn)
    assert step.version == 3 and step.__wrapped__ is fn and callable(step.lower)
    assert moe_xla.moe_jit(step).version == 3 and moe_xla.moe_jit(step)(1) == 1


def test_pytrees_are_rebuilt_of_their_own_parts():
    partial = jax.tree_util.Partial(lambda x, y: x * y, jnp.float32(2.0))
    np.testing.assert_array_equal(moe_xla.moe_jit(lambda f, x: f(x))(partial, X), X * 2)


def test_sizes_may_be_symbols(caplog):
    (b,) = jax.export.symbolic_shape("b")
    step = moe_xla.moe_jit(lambda x, w: jnp.argmax(x @ w, axis=1) + jnp.ones(x.shape[0]))
    exported = jax.export.export(step)(jax.ShapeDtypeStruct((b, 3), jnp.float32), jnp.eye(3))
    np.testing.assert_array_equal(exported.call(X, jnp.eye(3)), X.argmax(1) + 1)
    assert not caplog.records


def test_tokens_pass_through(caplog):
    step = moe_xla.moe_jit(lambda x, token: (x + 1, jax.lax.after_all(token), jax.lax.create_token()))
    token = jax.lax.create_token()
    np.testing.assert_array_equal(step(X, token)[0], X + 1)
    assert step.explain(X, token).sites == () and not caplog.records


def test_source_lines_are_the_callers():
    (eqn,) = jax.make_jaxpr(lambda x: moe_xla.moe_jit(lambda x: x + 1)(x))(X).eqns
    assert "test_moe_jit.py" in source_of(eqn)


def test_tracebacks_of_the_users_errors_have_no_frames_of_ours():
    def fails(x):
        raise ValueError("the user's own")

    step = moe_xla.moe_jit(fails)
    for use in (step, step.lower, step.trace, step.eval_shape, step.explain):
        with pytest.raises(ValueError) as raised:
            use(X)
        assert {entry.path.name for entry in raised.traceback} == {"test_moe_jit.py"}


def test_partials_and_callable_objects():
    class Scale:
        """Multiplies."""

        lower = "an attribute that moe_jit must not take over"

        def __init__(self, factor):
            self.explain = factor

        def __call__(self, x):
            return x * self.explain

    step = moe_xla.moe_jit(Scale(2.0))
    np.testing.assert_array_equal(step(X), X * 2)
    assert step.__doc__ == "Multiplies." and step.explain(X).function == "Scale"
    partial = moe_xla.moe_jit(functools.partial(lambda n, x, axis: jnp.repeat(x, n, axis), 2, axis=1))
    np.testing.assert_array_equal(partial(X), X.repeat(2, 1))
    assert partial.explain(X).function == "<lambda>"
    by_name = moe_xla.moe_jit(functools.partial(lambda x, n, m: jnp.tile(x, n * m), m=2), static_argnames=("n", "m"))
    np.testing.assert_array_equal(by_name(X, n=2), np.tile(X, 4))


@jax.tree_util.register_pytree_node_class
class Layer:
    """A model that is a pytree: its weights are traced."""

    def __init__(self, weight):
        self.weight = weight

    def tree_flatten(self):
        return (self.weight,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    @moe_xla.moe_jit
    def apply(self, x):
        """Multiplies."""
        assert isinstance(self.weight, jax.core.Tracer)
        return x * self.weight

    @functools.partial(moe_xla.moe_jit, static_argnames="n")
    def tiled(self, x, n):
        return jnp.tile(x * self.weight, n)


def test_method_of_a_pytree():
    layer = Layer(jnp.float32(3.0))
    np.testing.assert_array_equal(layer.apply(X), X * 3)
    np.testing.assert_array_equal(layer.tiled(X, n=2), np.tile(X * 3, 2))
    assert layer.apply.explain(X).sites == ()
    assert "HloModule" in layer.apply.lower(ABSTRACT).compile().as_text()
    assert layer.apply.eval_shape(ABSTRACT).shape == X.shape
    assert layer.apply.__name__ == "apply" and layer.apply.__doc__ == "Multiplies."
    assert list(inspect.signature(layer.apply).parameters) == ["x"]
    assert isinstance(layer.apply.trace(X), jax.stages.Traced)
    assert layer.apply == layer.apply and hash(layer.apply) == hash(layer.apply)
    assert layer.apply != Layer(jnp.float32(3.0)).apply
    layer.apply.clear_cache()
    np.testing.assert_array_equal(Layer.apply(layer, X), X * 3)
    gradient = jax.grad(lambda layer: layer.apply(X).sum())(layer)
    np.testing.assert_allclose(gradient.weight, X.sum(), atol=1e-6)


def test_method_with_static_self():
    class Trainer:
        factor = 2.0

        @moe_xla.moe_jit(static_argnums=0, donate_argnums=1)
        def step(self, state):
            return state * self.factor

    trainer, state = Trainer(), jnp.asarray(X)
    assert trainer.step.explain(state).sites == ()
    np.testing.assert_array_equal(trainer.step(state), X * 2)
    assert state.is_deleted()


def test_static_self_that_is_also_a_pytree_keeps_its_identity():
    layer, seen = Layer(np.float32(2.0)), []
    step = moe_xla.moe_jit(lambda layer, x: seen.append(layer) or x * layer.weight, static_argnums=0)
    np.testing.assert_array_equal(step(layer, X), X * 2)
    assert seen == [layer]


def test_inside_and_around_jit_and_itself():
    inner = moe_xla.moe_jit(lambda x: x * 2)
    outer = moe_xla.moe_jit(jax.jit(lambda x: inner(x) + 1))
    np.testing.assert_array_equal(jax.jit(outer)(X), X * 2 + 1)


@pytest.mark.parametrize("how", [{}, {"donate_argnums": 0}])
def test_debug_nans_runs_the_function_as_written(how):
    def fn(x):
        return x / x

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in div"):
        moe_xla.moe_jit(fn, **how)(jnp.zeros(3))


def test_strict_without_a_site_raises_from_everything():
    step = moe_xla.moe_jit(lambda x: x, strict=True)
    for use in (step, step.lower, step.trace, step.eval_shape, step.explain):
        with pytest.raises(moe_xla.RewriteError, match="no Mixture-of-Experts layer was found"):
            use(X)


def test_strict_names_reason_and_line(passes_find, rewritten_site, kept_site):
    passes_find(rewritten_site, kept_site)
    step = moe_xla.moe_jit(lambda x: x, strict=True)
    with pytest.raises(moe_xla.RewriteError, match=r"slots are not proven unique \(sort at model.py:38 \(route\)\)"):
        step(X)
    passes_find(rewritten_site)
    np.testing.assert_array_equal(step(X), X)


def test_a_fallback_is_logged_once_per_compilation(passes_find, rewritten_site, kept_site, caplog):
    passes_find(rewritten_site, kept_site)
    step = moe_xla.moe_jit(lambda x: x)
    with caplog.at_level("WARNING", logger="absl"):
        step(X), step(X), step.explain(X)
    (record,) = caplog.records
    assert record.getMessage() == (
        "moe_xla: <lambda>: site 2 from model.py:41 (moe) was kept: slots are not proven unique "
        "(sort at model.py:38 (route))"
    )


def test_nothing_is_logged_when_all_is_as_asked(passes_find, rewritten_site, caplog):
    passes_find(rewritten_site)
    with caplog.at_level("WARNING", logger="absl"):
        moe_xla.moe_jit(lambda x: x)(X)
    assert not caplog.records

"""One suite for every backend: sizes at their edges, and NaN wherever nothing may be read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_xla import ops
from moe_xla.ops import blocked
from moe_xla.ops.backends import BACKENDS
from tests.ops import reference

A, E, K, N = 67, 5, 13, 11  # off every tile
SIZES = {
    "even": (14, 13, 13, 13, 14),
    "uneven": (3, 40, 1, 0, 23),
    "empty first": (0, 20, 20, 20, 7),
    "empty last": (20, 20, 20, 7, 0),
    "all empty": (0, 0, 0, 0, 0),
    "one has everything": (0, 0, 67, 0, 0),
    "last has everything": (0, 0, 0, 0, 67),
    "below the row count": (5, 0, 9, 2, 1),
    "one row": (0, 1, 0, 0, 0),
}
SMALL, LOOPS = "", "in loops"
VARIANTS = [*((name, SMALL) for name in BACKENDS), ("blocked", LOOPS)]
DTYPES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}


@functools.cache
def operands(dtype):
    rng = np.random.default_rng(0)
    shapes = {"rows": (A, K), "w": (E, K, N), "ct": (A, N)}
    return {name: rng.normal(size=shape).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}


def poisoned(dtype, sizes):
    """Operands with NaN in tail rows and in the weights of experts without rows."""
    values = {name: x.copy() for name, x in operands(dtype).items()}
    values["rows"][sum(sizes) :] = np.nan
    values["ct"][sum(sizes) :] = np.nan
    values["w"][np.array(sizes) == 0] = np.nan
    return values


@pytest.fixture(params=VARIANTS, ids=lambda variant: " ".join(variant).strip())
def backend(request, monkeypatch):
    """Each backend, and each way in which it works."""
    if request.param[1] == LOOPS:
        monkeypatch.setattr(blocked, "_SMALL_WORK", 0)
    return request.param


def products(rows, w, ct, sizes, backend):
    """The product and the gradients of its operands, which are the other two kinds of product."""
    return [np.asarray(x) for x in compiled_products(rows, w, ct, np.array(sizes), backend)]


@functools.partial(jax.jit, static_argnames="backend")
def compiled_products(rows, w, ct, sizes, backend):
    backend, _ = backend
    out, pullback = jax.vjp(lambda rows, w: ops.grouped_dot(rows, w, sizes, backend=backend), rows, w)
    return out, *pullback(ct)


def assert_close(actual, expected, tolerance):
    actual = np.asarray(actual, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * max(np.abs(expected).max(), 1))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(backend, dtype, sizes):
    clean, values = operands(dtype), poisoned(dtype, sizes)
    out, d_rows, d_w = products(**values, sizes=sizes, backend=backend)
    assert {x.dtype for x in (out, d_rows, d_w)} == {jnp.dtype(dtype)}
    assert_close(out, reference.grouped_dot(clean["rows"], clean["w"], sizes), DTYPES[dtype])
    swapped = np.swapaxes(clean["w"], 1, 2)
    assert_close(d_rows, reference.grouped_dot(clean["ct"], swapped, sizes), DTYPES[dtype])
    assert_close(d_w, reference.grouped_outer(clean["rows"], clean["ct"], sizes), DTYPES[dtype])
    kept = sum(sizes)
    assert not np.any(out[kept:]), "tail rows must be exactly zero"
    assert not np.any(d_rows[kept:]), "the gradient of tail rows must be exactly zero"
    assert not np.any(d_w[np.array(sizes) == 0]), "weight gradients of empty groups must be exactly zero"


def test_float64(backend, x64):
    sizes = SIZES["below the row count"]
    values = {name: x.astype(np.float64) for name, x in poisoned("float32", sizes).items()}
    clean = operands("float32")
    out, d_rows, d_w = products(**values, sizes=sizes, backend=backend)
    assert {x.dtype for x in (out, d_rows, d_w)} == {np.dtype(np.float64)}
    assert_close(out, reference.grouped_dot(clean["rows"], clean["w"], sizes), 1e-13)
    assert_close(d_rows, reference.grouped_dot(clean["ct"], np.swapaxes(clean["w"], 1, 2), sizes), 1e-13)
    assert_close(d_w, reference.grouped_outer(clean["rows"], clean["ct"], sizes), 1e-13)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_weights_reach_only_their_expert(backend, bad):
    sizes = SIZES["even"]
    values = poisoned("float32", sizes)
    values["w"][2, 4, 7] = bad
    out, d_rows, d_w = products(**values, sizes=sizes, backend=backend)
    hit = np.zeros(A, bool)
    hit[reference.ranges(sizes)[2]] = True
    for result, column in ((out, 7), (d_rows, 4)):
        finite = np.isfinite(result)
        assert not finite[hit, column].any()
        assert finite[~hit].all()
        assert np.delete(finite[hit], column, axis=1).all()
    assert np.isfinite(d_w).all()


def test_nan_in_one_row_stays_in_its_row_and_expert(backend):
    sizes = SIZES["even"]
    values = poisoned("float32", sizes)
    values["rows"][30, 2] = np.nan  # a row of expert 2
    out, d_rows, d_w = products(**values, sizes=sizes, backend=backend)
    assert np.array_equal(np.flatnonzero(np.isnan(out).any(1)), [30])
    assert np.isfinite(d_rows).all()
    assert np.array_equal(np.flatnonzero(np.isnan(d_w).any((1, 2))), [2])


def test_sixteen_bit_sums_are_kept_in_float32(backend):
    rows = np.ones((4096, 1), jnp.bfloat16)  # a bfloat16 sum of ones stops at 256
    outer = jax.jit(functools.partial(ops.grouped_outer, backend=backend[0]))
    np.testing.assert_array_equal(outer(rows, rows, np.array([4094, 2])).ravel(), [4096, 2])  # 4094 is rounded once
    dot = jax.jit(functools.partial(ops.grouped_dot, backend=backend[0], preferred_element_type=np.float32))
    out = dot(rows[:4094].T, rows[None, :4094], np.array([1]))
    assert out.dtype == np.float32
    assert out.item() == 4094


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (5, 0, 2, 4), (5, 3, 0, 4), (5, 3, 2, 0)], ids=str)
def test_axes_without_elements(backend, shape):
    rows, experts, k, n = shape
    sizes = np.full(experts, rows // max(experts, 1))
    out = jax.jit(functools.partial(ops.grouped_dot, backend=backend[0]))(
        np.ones((rows, k), np.float32), np.ones((experts, k, n), np.float32), sizes
    )
    assert out.shape == (rows, n)
    assert not np.any(out)
    outer = jax.jit(functools.partial(ops.grouped_outer, backend=backend[0]))(
        np.ones((rows, k), np.float32), np.ones((rows, n), np.float32), sizes
    )
    assert outer.shape == (experts, k, n)
    assert not np.any(outer)

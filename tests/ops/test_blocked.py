"""The cutting of groups into blocks: every way in which a group can lie on the block sizes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_xla.ops import blocked
from tests.ops import reference

K, N = 3, 2
SHAPES = {"small mean": (300, 9), "large mean": (1500, 4), "few rows": (37, 3), "less than a unit": (7, 4)}


@pytest.fixture(autouse=True)
def _no_work_is_small(monkeypatch):
    monkeypatch.setattr(blocked, "_SMALL_WORK", 0)


def size_vectors(count, experts):
    rng = np.random.default_rng(count)
    yield np.eye(experts, dtype=np.int64)[0] * count
    yield np.eye(experts, dtype=np.int64)[-1] * count
    yield np.zeros(experts, np.int64)
    for concentration in (0.05, 0.3, 1, 10, 100):
        for kept in (count, count, count - 1, count // 2):
            yield rng.multinomial(kept, rng.dirichlet(np.full(experts, concentration)))
    sizes = {blocked.dot_block(count, experts), *blocked.outer_blocks(count, experts)}
    for size in {s + offset for s in sizes for offset in (-1, 0, 1)}:  # each edge of each block, from each side
        first = min(size, count)
        yield np.array([first, count - first, *[0] * (experts - 2)])
        yield np.array([*[0] * (experts - 2), count - first, first])


@pytest.mark.parametrize("count, experts", SHAPES.values(), ids=SHAPES)
def test_every_group_is_covered_exactly(count, experts):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(count, K)).astype(np.float32), rng.normal(size=(count, N)).astype(np.float32)
    w = rng.normal(size=(experts, K, N)).astype(np.float32)
    dot = jax.jit(functools.partial(blocked.grouped_dot, transpose_w=False, out_dtype=np.float32))
    outer = jax.jit(functools.partial(blocked.grouped_outer, out_dtype=np.float32))
    for sizes in size_vectors(count, experts):
        tail = np.arange(count)[:, None] >= sizes.sum()
        poisoned_a, poisoned_b = np.where(tail, np.nan, a), np.where(tail, np.nan, b)
        poisoned_w = np.where((sizes == 0)[:, None, None], np.nan, w)
        np.testing.assert_allclose(
            dot(poisoned_a, poisoned_w, sizes), reference.grouped_dot(a, w, sizes), atol=1e-5, err_msg=str(sizes)
        )
        np.testing.assert_allclose(
            outer(poisoned_a, poisoned_b, sizes), reference.grouped_outer(a, b, sizes), atol=1e-3, err_msg=str(sizes)
        )


@pytest.mark.parametrize("count", [1, 8, 9, 64, 65, 1000, 10**6])
@pytest.mark.parametrize("experts", [1, 8, 300])
def test_block_sizes(count, experts):
    """Neither many times a mean group, whose rows it would waste, nor a small part of it, nor too large for a cache."""
    mean = max(count / experts, 1)
    half, whole = blocked.outer_blocks(count, experts)
    for size in (blocked.dot_block(count, experts), whole):
        assert 8 <= size <= 512
        assert size <= mean + 16
        assert size >= min(mean / 3, 256)
    assert whole == 2 * half


def test_new_sizes_do_not_compile_again():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def dot(rows, w, sizes):
        return blocked.grouped_dot(rows, w, sizes, transpose_w=False, out_dtype=np.float32)

    for sizes in ([4, 4], [8, 0], [1, 2]):
        dot(jnp.ones((8, 3)), jnp.ones((2, 3, 5)), np.array(sizes))


@pytest.mark.parametrize("transpose_w", [False, True])
def test_temporaries_are_one_block_and_one_matrix(transpose_w):
    count, experts, k, n = 4096, 8, 64, 128
    rows = jax.ShapeDtypeStruct((count, n if transpose_w else k), np.float32)
    w = jax.ShapeDtypeStruct((experts, k, n), np.float32)
    sizes = jax.ShapeDtypeStruct((experts,), np.int32)
    dot = functools.partial(blocked.grouped_dot, transpose_w=transpose_w, out_dtype=np.float32)
    compiled = jax.jit(dot).lower(rows, w, sizes).compile()
    largest = blocked.dot_block(count, experts)
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * (2 * largest * (k + n) + 2 * k * n)

"""The choice of a backend: contracts, order, and reasons."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_xla import ops
from moe_xla.ops import backends
from moe_xla.ops.contract import Contract

F32 = np.dtype(np.float32)
NEED = ops.Need("cpu", (F32, F32), k=7, n=5)


def install(monkeypatch, name, contract, order=("cpu", "cuda")):
    table = {**backends.BACKENDS, name: types.SimpleNamespace(CONTRACT=contract)}
    monkeypatch.setattr(backends, "BACKENDS", table)
    monkeypatch.setattr(backends, "ORDER", {p: (name, *backends.ORDER[p]) for p in order})


def test_auto_takes_the_first_eligible_of_the_platform():
    assert ops.resolve("auto", NEED) == "blocked"
    assert ops.resolve("auto", ops.Need("tpu", (F32,), 7, 5)) == "ragged"
    assert ops.resolve("auto", ops.Need("cuda", (F32,), 7, 5)) == "blocked"
    assert ops.eligible(NEED) == ("blocked", "ragged")
    assert ops.refusals(NEED) == {}


@pytest.mark.parametrize(
    "contract, reason",
    [
        (Contract(("cuda",), ("float32",)), "it runs on cuda, not on cpu"),
        (Contract(("cpu",), ("bfloat16",)), "it takes bfloat16, not float32"),
        (Contract(("cpu",), ("float32",), k_alignment=8), "it needs k in multiples of 8, not 7"),
        (Contract(("cpu",), ("float32",), n_alignment=16), "it needs n in multiples of 16, not 5"),
        (
            Contract(("cpu",), ("float32",), group_alignment=128),
            "group sizes in multiples of 128, and they are known only",
        ),
        (Contract(("cpu",), ("float32",), min_jax=(99, 0)), "it needs jax 99.0, not"),
    ],
)
def test_an_uncovered_need_is_refused_with_its_reason(monkeypatch, contract, reason):
    install(monkeypatch, "other", contract)
    assert reason in ops.refusals(NEED)["other"]
    assert ops.resolve("auto", NEED) == "blocked"
    with pytest.raises(ValueError, match=f"'other' cannot run this grouped matmul: other: .*{reason}"):
        ops.resolve("other", NEED)


def test_a_covered_need_is_taken_in_order(monkeypatch):
    install(monkeypatch, "other", Contract(("cpu",), ("float32",)))
    assert ops.resolve("auto", NEED) == "other"


def test_auto_without_any_eligible_backend_gives_all_reasons():
    with pytest.raises(ValueError, match=r"blocked: it takes .*, not int8; ragged: it takes .*, not int8"):
        ops.resolve("auto", ops.Need("cpu", (np.dtype(np.int8),), 7, 5))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="backend is 'te'; allowed are 'auto', 'blocked', 'ragged'"):
        ops.resolve("te", NEED)


@pytest.mark.parametrize("platform, native", [("tpu", True), ("cuda", False), ("cpu", False)])
def test_auto_is_resolved_by_the_platform_that_a_program_is_lowered_for(platform, native):
    traced = jax.jit(ops.grouped_dot).trace(jnp.ones((4, 3)), jnp.ones((2, 3, 5)), jnp.array([1, 3]))
    assert ("ragged_dot" in traced.lower(lowering_platforms=(platform,)).as_text()) == native


def test_a_backend_that_cannot_run_raises_when_lowered(monkeypatch):
    install(monkeypatch, "other", Contract(("cuda",), ("float32",)))
    with pytest.raises(ValueError, match="other: it runs on cuda, not on cpu"):
        jax.jit(lambda x: ops.grouped_dot(x, jnp.ones((1, 3, 2)), jnp.array([4]), backend="other")).lower(
            jnp.ones((4, 3))
        )


@pytest.mark.parametrize(
    ("platform", "version", "name"),
    [("cpu", "cpu", "cpu"), ("tpu", "libtpu", "tpu"), ("gpu", "cuda 13000", "cuda"), ("gpu", "rocm 70000", "rocm")],
)
def test_the_default_platform_has_its_name_in_the_contracts(monkeypatch, platform, version, name):
    client = types.SimpleNamespace(platform=platform, platform_version=version)
    monkeypatch.setattr(jax.extend.backend, "get_backend", lambda: client)
    assert ops.default_platform() == name
    assert all(name in module.CONTRACT.platforms for module in backends.BACKENDS.values())

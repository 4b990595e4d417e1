"""The backends of the grouped matmuls in one table, and the choice between them.

In: a `Need`.  Out: the name of a backend whose contract covers it.  There is no silent fallback: a backend asked for
by name either runs or raises, and `refusals` says why the others were passed over.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

import jax.extend.backend

from moe_xla.ops import blocked, ragged
from moe_xla.ops.contract import Need, refusal

AUTO = "auto"

BACKENDS: Mapping[str, types.ModuleType] = {"blocked": blocked, "ragged": ragged}

# `ragged` is native on TPU only; elsewhere XLA expands it to a masked dense dot, E times the work and the memory.
ORDER: Mapping[str, tuple[str, ...]] = {
    "cpu": ("blocked", "ragged"),
    "cuda": ("blocked", "ragged"),
    "rocm": ("blocked", "ragged"),
    "tpu": ("ragged", "blocked"),
}


def default_platform() -> str:
    """The platform that programs are lowered for by default, by the name it has in a `Contract`."""
    client = jax.extend.backend.get_backend()
    if client.platform != "gpu":
        return str(client.platform)
    return "rocm" if client.platform_version.startswith("rocm") else "cuda"


def check_name(backend: str) -> str:
    """`backend` if it names a backend or is "auto", else a ValueError that lists them."""
    if backend not in (AUTO, *BACKENDS):
        allowed = ", ".join(repr(name) for name in (AUTO, *BACKENDS))
        raise ValueError(f"backend is {backend!r}; allowed are {allowed}")
    return backend


def refusals(need: Need) -> dict[str, str]:
    """Every backend that is not eligible for `need`, with the reason."""
    reasons = {name: refusal(module.CONTRACT, need) for name, module in BACKENDS.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def eligible(need: Need) -> tuple[str, ...]:
    """The backends whose contract covers `need`, in the order in which "auto" prefers them."""
    refused = refusals(need)
    return tuple(name for name in ORDER.get(need.platform, tuple(BACKENDS)) if name not in refused)


def resolve(backend: str, need: Need) -> str:
    """The backend that runs `need`: the named one, or for "auto" the first eligible one.

    Raises:
      ValueError: `backend` is unknown, or its contract does not cover `need`; the message gives the reasons.
    """
    check_name(backend)
    candidates = eligible(need)
    if backend == AUTO and candidates:
        return candidates[0]
    if backend in candidates:
        return backend
    asked = BACKENDS if backend == AUTO else (backend,)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals(need).items() if name in asked)
    raise ValueError(f"backend {backend!r} cannot run this grouped matmul: {reasons}")

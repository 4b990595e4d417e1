"""Whether a form is itself right, without the compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .check import assert_close, quick_jit, slot_arrays, tolerance
from .form import Form


def _rows(form: Form, y) -> np.ndarray:
    return np.asarray(y, np.float64).reshape(form.rows or form.tokens, -1)


def own_errors(form: Form, dtype=jnp.float32) -> list[str]:
    """What is wrong with a form: an empty list where it is as its description says."""
    errors = []
    params, x = form.inputs(dtype)
    loose_step = quick_jit(form.step(form.loose))
    (_, (loose, _)), gradients = loose_step(params, x)
    tight, _ = quick_jit(form.at(form.tight))(params, x)
    for name, leaf in (("y", loose), *((f"gradient {i}", g) for i, g in enumerate(jax.tree.leaves(gradients)))):
        if not np.isfinite(np.asarray(leaf, np.float64)).all():
            errors.append(f"{name} is not finite")
    # A row that changed lost at least one of its assignments.
    dropped = np.any(_rows(form, loose) != _rows(form, tight), axis=1).mean() / form.choices
    if dropped < 0.1:
        errors.append(f"only {dropped:.0%} of the assignments are known to drop")
    if form.dense is not None:
        try:
            assert_close(loose, quick_jit(form.dense)(params, x), tolerance(form, dtype))
        except AssertionError as error:
            errors.append(f"differs from the dense reference: {error}")
    if not slot_arrays(form, jax.make_jaxpr(form.at(form.tight))(params, x).jaxpr, form.tight):
        errors.append("its slot arrays cannot be told by their shapes")
    if mistaken := slot_arrays(form, jax.make_jaxpr(form.step(form.loose))(params, x).jaxpr, form.tight):
        errors.append(f"these arrays look like slot arrays: {mistaken}")
    if form.mixes_tokens:
        return errors
    # Without drops the tokens do not see each other.
    flat = x.reshape(form.rows or form.tokens, -1)
    victim = len(flat) // 3
    (_, (moved, _)), _ = loose_step(params, flat.at[victim].add(0.7).reshape(x.shape))
    changed = np.abs(_rows(form, moved) - _rows(form, loose)).max(1) > tolerance(form, dtype) * 10
    if changed.sum() != 1 or not changed[victim]:
        errors.append(f"moving token {victim} changes rows {np.flatnonzero(changed).tolist()}")
    return errors

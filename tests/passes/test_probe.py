"""The numeric guard: good layers pass, faults of the rewriting are refused, and what cannot be judged is said."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_xla
from moe_xla import ops
from moe_xla.passes import pipeline, probe
from moe_xla.passes.recover.lower import rows, sums
from moe_xla.passes.recover.rules import TABLE
from tests.forms import FORMS
from tests.forms.check import QUICK, assert_close, quick_jit

SEMANTICS = ("exact", "dropless")
every_semantics = pytest.mark.parametrize("semantics", SEMANTICS)


def _rewritten(program, inputs, semantics="exact"):
    options = pipeline.PassOptions(semantics=semantics, probe=True)
    return pipeline.rewrite_jaxpr(jax.make_jaxpr(program)(*inputs), options)


def _site(program, inputs, semantics="exact"):
    (site,) = _rewritten(program, inputs, semantics).sites
    return site


def _roomy(form):
    """A capacity that drops nothing of even loads, and something of uneven ones."""
    return form.tokens * form.choices // (form.groups * form.experts) + 3


# --- good layers pass

GOOD = (
    *("top2_argmax", "overflow_width", "experts_custom_jvp", "remat_experts", "two_layers"),
    *("scan_grouped", "scan_of_remat_names"),
)


@every_semantics
@pytest.mark.parametrize("name", GOOD)
def test_good_layers_stay_rewritten(name, semantics):
    form = FORMS[name]
    sites = _rewritten(form.step(_roomy(form)), form.inputs(jnp.float32), semantics).sites
    assert len(sites) == form.sites
    assert {(site.status, site.semantics, site.reason) for site in sites} == {("rewritten", semantics, None)}
    for site in sites:
        assert " agree" in site.probed and " 0 with one token" not in site.probed


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_short_floats(dtype):
    form = FORMS["top2"]
    site = _site(form.step(_roomy(form)), form.inputs(dtype))
    assert site.status == "rewritten" and " agree" in site.probed


@pytest.mark.usefixtures("x64")
def test_float64_agrees_to_its_own_rounding():
    form = FORMS["top2"]
    captured = jax.make_jaxpr(form.step(form.tight))(*form.inputs(jnp.float64))
    (outcome,) = pipeline.rewrite_jaxpr(captured, pipeline.PassOptions("exact", probe=True)).outcomes
    assert outcome.is_judged and 0 < outcome.error < 1e-13


def test_a_vmapped_layer():
    form = FORMS["top2"]
    params, x = form.inputs(jnp.float32)
    program = jax.vmap(form.at(form.tight), in_axes=(None, 0))
    site = _site(program, (params, jnp.stack([x, 2 * x])))
    assert site.status == "rewritten" and " agree" in site.probed


@every_semantics
def test_dropless_is_compared_itself_where_even_loads_fit(semantics):
    form = FORMS["top2_choice_major"]
    inputs = form.inputs(jnp.float32)
    assert "in the exact semantics" not in _site(form.at(_roomy(form)), inputs, semantics).probed
    tight = _site(form.at(form.tight), inputs, semantics)
    assert ("in the exact semantics, as even loads overflow" in tight.probed) == (semantics == "dropless")
    assert tight.status == "rewritten"


def test_probes_are_the_same_every_time():
    form = FORMS["switch"]
    assert len({_site(form.at(form.tight), form.inputs(jnp.float32)).probed for _ in range(2)}) == 1


# --- faults are refused


def _too_large(monkeypatch):
    real = ops.grouped_dot
    monkeypatch.setattr(ops, "grouped_dot", lambda *args, **kwargs: 1.5 * real(*args, **kwargs))


def _of_another_token(monkeypatch):
    real = rows.take_rows
    monkeypatch.setattr(rows, "take_rows", lambda table, index, **kwargs: real(table, jnp.roll(index, 1), **kwargs))


def _dropped_rows_stay(monkeypatch):
    for module in (rows, sums):
        real = module.routing_by
        monkeypatch.setattr(module, "routing_by", lambda graph, index, conditions, real=real: real(graph, index, ()))
        monkeypatch.setattr(module, "unheld", lambda guards, routing, points: [])


def _rule_off_by_a_factor(monkeypatch):
    real = TABLE["dot_general"]

    def doubled(context, eqn, *values):
        value = real(context, eqn, *values)
        return dataclasses.replace(value, pieces=tuple(p.replace(coef=2 * p.coef) for p in value.pieces))

    monkeypatch.setitem(TABLE, "dot_general", doubled)


FAULTS = {
    "a grouped matmul off by a factor": _too_large,
    "rows of another token": _of_another_token,
    "dropped rows stay": _dropped_rows_stay,
    "a rule off by a factor": _rule_off_by_a_factor,
}


@pytest.mark.parametrize(
    ("name", "fault"), [*(("top2", fault) for fault in FAULTS), *(("scan", fault) for fault in list(FAULTS)[:2])]
)
def test_a_wrong_number_is_refused(monkeypatch, name, fault):
    FAULTS[fault](monkeypatch)
    form = FORMS[name]
    inputs = form.inputs(jnp.float32)
    program = form.step(form.tight)
    step = moe_xla.moe_jit(program, semantics="exact", probe=True, compiler_options=QUICK)
    (site,) = step.explain(*inputs).sites
    assert site.status == "kept" and site.probed is None
    assert site.reason.startswith("probe: the rewritten layer differs from the layer as written by "), site.reason
    assert "float32[" in site.reason and ".py:" in site.reason
    assert_close(step(*inputs), quick_jit(program)(*inputs), 0)


def test_a_wrong_number_in_dropless_alone_leaves_the_site_exact(monkeypatch):
    form = FORMS["top2"]
    inputs = form.inputs(jnp.float32)
    real = rows.RowEmitter._grouped_dot

    def wrong(self, *args):
        dropless = self.recovery.session.default == "dropless"
        is_exact = "exact" in self.recovery.session.modes.values()
        return real(self, *args) * (1.5 if dropless and not is_exact else 1.0)

    monkeypatch.setattr(rows.RowEmitter, "_grouped_dot", wrong)
    site = _site(form.step(_roomy(form)), inputs, "dropless")
    assert (site.status, site.semantics) == ("rewritten", "exact")
    assert site.reason.startswith("probe: the rewritten layer differs")


def test_a_replacement_that_mixes_rows_is_refused_however_little(monkeypatch):
    real = ops.grouped_dot

    def mixing(x, *args, **kwargs):
        out = real(x, *args, **kwargs)
        return out + 1e-4 * jnp.mean(out, axis=0, keepdims=True)

    monkeypatch.setattr(ops, "grouped_dot", mixing)
    form = FORMS["top2"]
    site = _site(form.at(form.tight), form.inputs(jnp.float32))
    assert site.status == "kept"
    assert site.reason.startswith("probe: one token's rows move others in the rewritten layer"), site.reason


def test_the_other_layer_stays_rewritten(monkeypatch):
    form = FORMS["two_layers"]
    inputs, program = form.inputs(jnp.float32), form.at(form.tight)
    real = rows.RowEmitter._grouped_dot
    (first, _) = pipeline.rewrite_jaxpr(jax.make_jaxpr(program)(*inputs), pipeline.PassOptions("exact")).sites

    def wrong(self, rows_, matrix, routing, *args):
        sites = self.recovery.session.sites_of(rows.key_of(routing.index))
        off = any(first.source == pipeline.describe(self.recovery.session.sources[s]) for s in sites)
        return real(self, rows_, matrix, routing, *args) * (1.5 if off else 1.0)

    monkeypatch.setattr(rows.RowEmitter, "_grouped_dot", wrong)
    kept, rewritten = _rewritten(program, inputs).sites
    assert (kept.status, rewritten.status) == ("kept", "rewritten")
    assert kept.reason.startswith("probe: ") and rewritten.probed


def test_strict_raises(monkeypatch):
    _too_large(monkeypatch)
    form = FORMS["switch"]
    step = moe_xla.moe_jit(form.at(form.tight), probe=True, strict=True)
    with pytest.raises(moe_xla.RewriteError, match="probe: the rewritten layer differs"):
        step(*form.inputs(jnp.float32))


# --- what cannot be judged is said, and stays rewritten


def test_too_large_programs_are_not_probed(monkeypatch):
    form = FORMS["switch"]
    for name, unit in (("LARGEST_FLOPS_OF_CPUS", "FLOPs"), ("LARGEST_BYTES", "bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(probe, name, 1e3)
            site = _site(form.at(form.tight), form.inputs(jnp.float32))
        assert site.status == "rewritten"
        assert site.probed.startswith("nothing was judged: the program as written ") and unit in site.probed


def test_numbers_that_are_zero_or_infinite_are_not_judged():
    form = FORMS["switch"]

    def program(params, x):
        return form.at(form.tight)(params, x * 0 + jnp.inf)

    site = _site(program, form.inputs(jnp.float32))
    assert site.status == "rewritten" and site.probed.startswith("nothing was judged: "), site.probed


def test_roots_and_logarithms_of_inputs_are_judged_on_positive_ones():
    form = FORMS["switch"]

    def program(params, x):
        return form.at(form.tight)(params, jnp.sqrt(x) + jnp.log(x))

    site = _site(program, form.inputs(jnp.float32))
    assert site.status == "rewritten" and " agree" in site.probed


def test_effects_do_not_run_on_probes(capfd):
    form = FORMS["switch"]

    def program(params, x):
        jax.debug.print("a print of the step")
        return form.at(form.tight)(params, x)

    site = _site(program, form.inputs(jnp.float32))
    assert " agree" in site.probed and "a print of the step" not in capfd.readouterr().out


def test_integer_inputs_keys_and_states_of_optimizers():
    form = FORMS["top2"]
    params, _ = form.inputs(jnp.float32)

    def program(params, table, ids, key, count):
        x = table[ids] + 0.1 * jax.random.normal(key, (len(ids), table.shape[1]))
        grads = jax.grad(lambda p: form.loss(form.tight)(p, x)[0])(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g / (jnp.abs(g) + 1e-8) / (1 + count), params, grads)

    table = jnp.ones((50, 6))
    inputs = (params, table, np.arange(41), jax.random.key(3), 2)
    site = _site(program, inputs)
    assert site.status == "rewritten" and " agree" in site.probed

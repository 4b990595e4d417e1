"""The benchmark at tiny sizes: what it compares is comparable, and what it reports has the promised structure.

No time is judged here.
"""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_xla.bench import layers, measure, overhead, tables

TINY = layers.Problem(tokens=40, model=8, hidden=12, experts=4, choices=2)


def problem_of(form, **changes):
    return dataclasses.replace(TINY, form=form, choices=layers.FORM_CHOICES.get(form, 2), **changes)


def run_bench(*arguments):
    sizes = ("--tokens=40", "--model=8", "--hidden=12", "--experts=4")
    command = [sys.executable, "-m", "moe_xla", "bench", *sizes, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("form", layers.FORMS)
def test_naive_forms_and_the_hand_written_layer_agree_where_nothing_overflows(form):
    problem = problem_of(form, capacity_factor=4.0)
    args = layers.layer_arguments(problem, jax.random.key(1))
    naive, by_hand = (
        jax.jit(measure.value_and_gradients(layer, problem))(*args)
        for layer in (layers.naive_layer, layers.ragged_layer)
    )
    assert measure.largest_error(naive, by_hand) < 1e-5


@pytest.mark.parametrize("form", sorted(set(layers.FORMS) - layers.WITHOUT_CAPACITY))
def test_naive_forms_drop_what_overflows(form):
    problem = problem_of(form, capacity_factor=0.5)
    params, x = layers.layer_arguments(problem, jax.random.key(1))
    y, _ = layers.naive_layer(params, x, problem)
    by_hand, _ = layers.ragged_layer(params, x, problem)
    assert not np.allclose(y, by_hand, atol=1e-3)


def test_limit_does_the_useful_flops():
    problem = dataclasses.replace(TINY, model=64, hidden=128)
    args = layers.dense_arguments(problem, jax.random.key(0))
    step = measure.value_and_gradients(layers.dense_layer, problem)
    flops = jax.jit(step).lower(*args).compile().cost_analysis()["flops"]
    # Two matmuls, each with two of the same size for its gradients, a multiply-add counted as two.
    useful = 2 * 3 * 2 * problem.assignments * problem.model * problem.hidden
    assert useful < flops < 1.2 * useful


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("  %mask = f32[40,4,25]{2,1,0} fusion(%a), kind=kLoop", 1),
        ("  ROOT %buffer = bf16[4,25,8]{2,1,0} dot(%a, %b)", 1),
        ("  %pair = (f32[100,8]{1,0}, pred[40,100]{1,0}, s32[]) while(%init)", 2),
        ("  %rows = f32[80,8]{1,0} gather(%x, %i)", 0),
        ("  %reader = f32[40]{0} reduce(f32[40,100]{1,0} %mask, f32[] %zero)", 0),
        ("  %scalar = f32[] parameter(0)", 0),
    ],
)
def test_slot_shapes_are_those_of_results_with_the_size_of_a_mask_or_a_buffer(line, count):
    assert TINY.capacity == 25
    assert len(measure.slot_shapes(f"ENTRY %main {{\n{line}\n}}", TINY)) == count


def test_measurements_are_relative_to_the_limit():
    names = ["naive", "exact", "ragged_dot", "limit"]
    measured = measure.measurements(TINY, names, repeats=2, seed=0)
    assert list(measured) == names
    assert measured["limit"].seconds_ratio == measured["limit"].temporary_ratio == 1
    assert measured["naive"].slot_arrays > 0
    assert measured["ragged_dot"].slot_arrays == measured["limit"].slot_arrays == 0
    for name, m in measured.items():
        assert m.seconds > 0 and m.compile_seconds > 0 and m.trace_seconds > 0
        assert m.seconds_ratio == pytest.approx(m.seconds / measured["limit"].seconds)
        assert (m.sites is not None) == (name == "exact")
    assert measured["exact"].error < 1e-4
    assert measured["naive"].error is None
    table = tables.layer_table(TINY, measured).splitlines()
    assert table[0].endswith("T=40 d=8 f=12 E=4 K=2 C=25 float32")
    assert [line.split()[0] for line in table[2:6]] == names


def test_without_the_limit_there_are_no_ratios():
    measured = measure.measurements(TINY, ["naive"], repeats=1, seed=0)
    assert measured["naive"].seconds_ratio is measured["naive"].temporary_ratio is None


def test_variants_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) or jnp.zeros(()) for name in "ab"}
    seconds = measure.interleaved_seconds(calls, repeats=2)
    assert order == ["a", "b", "a", "b"]
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize("scanned", [False, True])
def test_deep_step_is_a_training_step(scanned):
    step = overhead.deep_step(TINY, scanned)
    params, x = overhead.deep_arguments(TINY, 3, scanned)
    new_params, loss = jax.eval_shape(step, params, x)
    assert jax.tree.map(lambda leaf: leaf.shape, new_params) == jax.tree.map(lambda leaf: leaf.shape, params)
    assert loss.shape == ()


def test_overhead_compares_each_compiler_with_the_naive_step():
    measured = overhead.overheads(TINY, layers=2, repeats=1)
    steps = ("2 layers unrolled", "2 layers scanned")
    assert [(o.step, o.compiler) for o in measured] == [(s, c) for s in steps for c in ("naive", "exact", "dropless")]
    for o in measured:
        assert (o.sites is None) == (o.compiler == "naive")
        if o.compiler == "naive":
            assert (o.added_seconds, o.compile_ratio) == (0, 1)
    assert len(tables.overhead_table(TINY, measured).splitlines()) >= 2 + len(measured)


def test_command_writes_json(tmp_path):
    path = tmp_path / "bench.json"
    done = run_bench("--variants=naive,limit", "--repeats=1", f"--json={path}")
    assert done.returncode == 0, done.stderr
    assert "top_k layer, value and gradients, T=40" in done.stdout
    written = json.loads(path.read_text())
    assert written["machine"]["jax"] == jax.__version__
    (result,) = written["results"]
    assert result["problem"] == dataclasses.asdict(TINY) | {"capacity": 25}
    assert list(result["variants"]) == ["naive", "limit"]
    fields = {field.name for field in dataclasses.fields(measure.Measurement)}
    assert all(set(m) == fields for m in result["variants"].values())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--variants=naive,fast"], "each must be one of naive, exact, dropless, ragged_dot, limit"),
        (["--experts=4,many"], "must be positive integers"),
        (["--form=switch", "--choices=2"], "--form=switch goes with --choices=1"),
        (["quickly"], "bench takes flags only, got 'quickly'"),
    ],
)
def test_bad_flags_are_named(arguments, error):
    done = run_bench(*arguments)
    assert done.returncode != 0
    assert error in done.stdout + done.stderr

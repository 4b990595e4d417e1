"""The training demo at tiny sizes: the model is a model, the comparison tells equal from unequal, the program runs."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import comparison
import naive_moe
import stdlib_text

EXAMPLES = pathlib.Path(naive_moe.__file__).parent
TINY = naive_moe.Config(layers=2, model=8, hidden=12, heads=2, experts=4, sequence=16)


class FakeExecutable:
    """A compiled step whose state counts the steps, and whose loss is the state."""

    def __call__(self, state, batch):
        return state + 1, state

    def memory_analysis(self):
        return type("Stats", (), {"temp_size_in_bytes": 3_000_000})


def run_of(name, losses):
    return comparison.Run(comparison.Program(name, FakeExecutable(), 1.5), losses, [0.5] * len(losses))


def tiny_batch(seed=0):
    return next(stdlib_text.batches(stdlib_text.read_text(), 1, 4, TINY.sequence + 1, seed))


def test_text_is_python_source():
    text = stdlib_text.read_text()
    assert text.dtype == np.uint8
    assert b"def __init__(self" in text.tobytes()


def test_batches_are_pieces_of_the_text_and_depend_on_the_seed_only():
    text = stdlib_text.read_text()
    first, again = (list(stdlib_text.batches(text, 2, 3, 17, seed=5)) for _ in range(2))
    assert all(batch.shape == (3, 17) and batch.dtype == np.uint8 for batch in first)
    np.testing.assert_array_equal(first, again)
    assert first[0][0].tobytes() in text.tobytes()
    assert not np.array_equal(first, list(stdlib_text.batches(text, 2, 3, 17, seed=6)))


def test_untrained_model_knows_nothing():
    loss = jax.jit(naive_moe.loss, static_argnums=2)
    metrics = [loss(naive_moe.init(jax.random.key(seed), TINY), tiny_batch(), TINY)[1] for seed in range(6)]
    assert np.mean([m["cross_entropy"] for m in metrics]) == pytest.approx(np.log(naive_moe.BYTES), abs=0.3)
    assert np.mean([m["balance"] for m in metrics]) == pytest.approx(1, abs=0.7)


def test_model_is_causal():
    params = naive_moe.init(jax.random.key(0), TINY)
    # Capacity couples the tokens of a batch, so there has to be room for all of them.
    config = naive_moe.Config(**(vars(TINY) | {"capacity_factor": 4.0}))
    batch = tiny_batch()
    changed = batch.copy()
    changed[:, 10:] ^= 1

    def hidden(batch):
        x = params["embed"][batch[:, :-1]] + params["position"]
        return naive_moe.run_layers(params["layers"], x, config)[0]

    before, after = hidden(batch), hidden(changed)
    np.testing.assert_allclose(before[:, :10], after[:, :10], atol=1e-5)
    assert not np.allclose(before[:, 10:], after[:, 10:], atol=1e-3)


def test_scanned_layers_compute_what_unrolled_ones_do():
    scanned = naive_moe.Config(**(vars(TINY) | {"scan": True}))
    key, batch = jax.random.key(3), tiny_batch()
    losses = [
        jax.jit(naive_moe.loss, static_argnums=2)(naive_moe.init(key, config), batch, config)[0]
        for config in (TINY, scanned)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_training_collects_one_loss_and_time_a_step():
    run = comparison.train(comparison.Program("fake", FakeExecutable(), 0.0), 0.0, [np.zeros(2)] * 3)
    assert run.losses == [0.0, 1.0, 2.0]
    assert len(run.seconds) == 3


def test_table_compares_with_the_first_run():
    slow, fast = run_of("slow", [2.0, 1.0]), run_of("fast", [2.0, 1.5])
    fast = comparison.Run(fast.program, fast.losses, [0.1, 0.1])
    _, slow_row, fast_row = comparison.table([slow, fast]).splitlines()
    assert slow_row.split() == "slow 500 ms 1.00 x 3 MB 1.5 s 1.0000".split()
    assert fast_row.split() == "fast 100 ms 5.00 x 3 MB 1.5 s 1.5000".split()


def test_difference_counts_every_step_and_no_nan_is_lost():
    reference = run_of("a", [2.0, 1.0, 1.0])
    assert comparison.largest_difference(run_of("b", [2.0, 1.25, 1.0]), reference) == 0.25
    assert np.isnan(comparison.largest_difference(run_of("b", [2.0, np.nan, 1.0]), reference))


def test_program_trains_compares_and_plots(tmp_path):
    plot = tmp_path / "plot.png"
    sizes = ["--layers=2", "--model=8", "--hidden=12", "--experts=4", "--sequence=16", "--tokens=64"]
    command = [sys.executable, EXAMPLES / "train_bytes.py", "--steps=3", f"--plot={plot}", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    for name in ("jax.jit", "moe_jit, exact", "moe_jit, dropless"):
        assert f"\n{name}  " in done.stdout
        assert f"{name}" in done.stderr, "no progress bar"
    assert "losses of exact and of jax.jit differ by" in done.stdout

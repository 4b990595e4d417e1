"""The persistent compilation cache of jax is hit by a second process: the program is the same bytes each time."""

import json
import os
import subprocess
import sys

PROGRAM = """
import json
import jax, jax.numpy as jnp
import moe_xla

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))

@moe_xla.moe_jit(donate_argnums=0, static_argnames="n")
def step(state, x, n):
    return jax.tree.map(lambda leaf: leaf + jnp.tanh(x).sum() * n, state), x.mean()

step({"w": jnp.ones((3, 3))}, jnp.ones(4), n=2)
counts = {end: sum(event.endswith(end) for event in events) for end in ("cache_hits", "cache_misses")}
print(json.dumps(counts))
"""


def run_program(cache):
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), sorted(path.name for path in cache.glob("*step*-cache"))


def test_second_process_hits_the_persistent_cache(tmp_path):
    first, entries = run_program(tmp_path)
    second, entries_after = run_program(tmp_path)
    assert len(entries) == 1 and entries_after == entries
    assert first["cache_hits"] == 0 and first["cache_misses"] > 0
    assert second == {"cache_hits": first["cache_misses"], "cache_misses": 0}

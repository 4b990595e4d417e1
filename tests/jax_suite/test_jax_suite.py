"""The comparison itself: on a few tests of our own, it sees the failing one and counts what went through `moe_jit`."""

import textwrap

import pytest

from tests.jax_suite import __main__ as suite
from tests.jax_suite import files

TESTS = """
    import functools
    import jax
    from jax import jit
    from jax._src import api

    def test_every_name_of_jit():
        steps = jax.jit(abs), api.jit(abs), jit(inline=True)(abs), functools.partial(jax.jit, inline=True)(abs)
        assert all(step(-1) == 1 for step in steps)
        assert len({type(step) for step in steps}) == 1

    def test_private_detail():
        assert jit(lambda x: x)._cache_size() == 0

    def test_fails_with_both():
        assert jit(abs)(-1) == 2
"""


@pytest.fixture
def checkout(tmp_path):
    """What the script needs of a checkout of jax."""
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "own_test.py").write_text(textwrap.dedent(TESTS))
    return tmp_path


def test_what_passes_with_jit_alone_is_found(checkout, capsys, monkeypatch):
    run = [str(checkout), "own_test.py", "--results", str(checkout / "results"), "--workers", "1"]
    assert suite.main(run) == 1
    printed = capsys.readouterr().out
    assert "| own_test.py | 2 | 1 | 0 | 1 | 6 / 5 / 1 / 0 |" in printed
    assert "    test_private_detail: AttributeError" in printed
    monkeypatch.setitem(files.KNOWN, "test_private*", "reads a private attribute")
    assert suite.main([*run, "--reuse"]) == 0
    assert "known: test_private_detail: reads a private attribute" in capsys.readouterr().out


def test_a_run_in_which_nothing_went_through_moe_jit_is_no_success():
    run = suite.Run({"a": "passed"}, {}, {"made": 1, "traced": 0}, 1.0, None)
    assert suite.exit_status([suite.Judgement("own_test.py", run, run, {}, {})]) == 1


def test_a_test_that_never_ended_counts_as_failed(tmp_path):
    path = tmp_path / "outcomes"
    path.write_text('{"started": "a"}\n{"test": "a", "outcome": "passed", "error": null}\n{"started": "b"}\n{"tes')
    run = suite.read_run(path, 0.0, None)
    assert run.passed == {"a"} and run.errors["b"] == suite.HUNG

"""`python -m moe_xla`: commands, help, errors."""

import subprocess
import sys
import types

import pytest

import moe_xla
from moe_xla import __main__ as command_line


def run_module(*arguments):
    return subprocess.run([sys.executable, "-m", "moe_xla", *arguments], capture_output=True, text=True, timeout=120)


def test_version():
    done = run_module("--version")
    assert (done.returncode, done.stdout.strip()) == (0, moe_xla.__version__)


def test_help_lists_the_commands():
    assert "bench    times one" in run_module("--help").stdout


@pytest.mark.parametrize("arguments, error", [((), "no command given"), (("benhc",), "unknown command 'benhc'")])
def test_without_a_command_those_there_are_are_named(arguments, error, capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line.run(["moe_xla", *arguments])
    assert stopped.value.code
    assert f"{error}; commands are: bench" in capsys.readouterr().err


def test_bench_gets_the_arguments_after_its_name(monkeypatch):
    received = []
    fake = types.ModuleType("moe_xla.bench")
    fake.main = received.append
    monkeypatch.setitem(sys.modules, "moe_xla.bench", fake)
    with pytest.raises(SystemExit) as stopped:
        command_line.run(["moe_xla", "bench", "quick"])
    assert not stopped.value.code and received == [["moe_xla", "quick"]]

"""Command line of moe_xla.

Usage: python -m moe_xla COMMAND [flags]

Commands:
  bench    times one Mixture-of-Experts layer, naive and rewritten, beside hand-written ones and the limit

`python -m moe_xla COMMAND --help` lists the flags of a command.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from absl import app, flags

import moe_xla

COMMANDS = {"bench": "moe_xla.bench"}

_VERSION = flags.DEFINE_bool("version", False, "Print the version of moe_xla and exit.")


def run(argv: Sequence[str]) -> None:
    """Runs the command that `argv[1]` names, with its own flags and the rest of `argv`."""
    if len(argv) < 2 or argv[1] not in COMMANDS:
        app.run(_without_command, argv=list(argv))
        return
    command = importlib.import_module(COMMANDS[argv[1]])
    flags.adopt_module_key_flags(command)
    app.run(command.main, argv=[argv[0], *argv[2:]])


def _without_command(argv: Sequence[str]) -> None:
    if _VERSION.value:
        print(moe_xla.__version__)
        return
    given = f"unknown command {argv[1]!r}" if len(argv) > 1 else "no command given"
    raise app.UsageError(f"{given}; commands are: {', '.join(COMMANDS)}")


if __name__ == "__main__":
    run(sys.argv)

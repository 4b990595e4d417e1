"""A long run over generated programs: a development tool.

    python -m tests.generated [N] [--seed SEED] [--keep-going] [--table]

Run from the root of the repository.  N different programs are drawn and judged.  The first wrong one is made smaller
and printed by its choices, to be copied into `test_generated.NAMED`; `--keep-going` prints each wrong one as it was
drawn.  At the end stands how many were rewritten of those that are meant to be; `--table` says which were not.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import logging

from .judge import Verdict
from .programs import Program
from .runs import meant, refusals, rewritten_share, run_programs, table

PROGRESS_EVERY = 100


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", nargs="?", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    logging.set_verbosity(logging.ERROR)  # the refusals are counted here
    start, wrong, judged = time.perf_counter(), [], []

    def on_wrong(program: Program, error: Exception) -> None:
        wrong.append(program)
        print(f"WRONG {program}\n  {type(error).__name__}: {error}", flush=True)

    def on_judged(verdicts: list[Verdict]) -> None:
        judged.append(verdicts)
        if len(judged) % PROGRESS_EVERY == 0:
            print(f"{len(judged)} programs in {time.perf_counter() - start:.0f} s", flush=True)

    print(f"{options.number} programs, --seed {options.seed}", flush=True)
    wrong_one = on_wrong if options.keep_going else None
    verdicts = run_programs(options.number, options.seed, wrong_one, on_judged, stops=True)
    if options.table:
        print("\n".join([*refusals(verdicts), *table(verdicts)]))
    asked = len(meant(verdicts))
    print(
        f"{len(judged)} programs in {time.perf_counter() - start:.0f} s, {len(wrong)} wrong;"
        f" {rewritten_share(verdicts):.1%} of the {asked} rewrites that were asked for"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

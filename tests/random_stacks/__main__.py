"""Runs stacks of a kind by their seeds, and prints a table of how each ended.

::

    python -m tests.random_stacks configurations 17    # one stack, with all that is known about its end
    python -m tests.random_stacks calls 0:250 --log calls.log
"""

import argparse
import sys
import traceback
from collections import Counter
from pathlib import Path

from tests.harness import shut_down
from tests.random_programs.trial import Outcome
from tests.random_stacks.kinds import KINDS, attempt
from tests.random_stacks.stack import Stack

SHOWN = 1000  # characters of a failure in a table; a log has all


def main() -> int:
    """Returns 1 if a stack did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument("seeds", help="a seed, or FIRST:STOP")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a stack may take")
    parser.add_argument("--log", type=Path, help="append a line per stack, and all of what failed")
    arguments = parser.parse_args()
    first, _, stop = arguments.seeds.partition(":")
    seeds = range(int(first), int(stop) if stop else int(first) + 1)
    ends: Counter[str] = Counter()
    print(f"{'seed':>6} {'end':<10} {'time':>6}  what was drawn", flush=True)
    for seed in seeds:
        stack = KINDS[arguments.kind].draw(seed)
        try:
            outcome = attempt(stack, arguments.limit)
        except Exception:  # the harness or a drawing failed: reported like every other end
            outcome = Outcome("failed", traceback.format_exc(), 0.0)
        ends[outcome.kind] += 1
        line = f"{seed:>6} {outcome.kind:<10} {outcome.seconds:>5.1f}s  {stack.summary()}"
        details = _details(stack, outcome, everything=len(seeds) == 1)
        print(line, *(details if len(seeds) == 1 else (text[:SHOWN] for text in details)), sep="\n", flush=True)
        if arguments.log is not None:
            with arguments.log.open("a") as file:
                print(line, *details, sep="\n", file=file)
    print(f"{len(seeds)} stacks: {dict(ends)}", flush=True)
    shut_down()
    return int(bool(ends["different"] + ends["failed"]))


def _details(stack: Stack, outcome: Outcome, *, everything: bool) -> list[str]:
    if outcome.is_finding or everything:
        return [outcome.text, stack.describe()]
    return [f"{'':>24}  {' '.join(outcome.text.split())[:300]}"] if outcome.text else []


if __name__ == "__main__":
    sys.exit(main())

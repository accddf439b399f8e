"""Runs programs by their seeds and logs how each ended.

::

    python -m tests.random_programs 17             # one program, with all that is known about its end
    python -m tests.random_programs 0:250 --log programs.log
"""

import argparse
import sys
import traceback
from collections import Counter
from pathlib import Path

from tests.harness import shut_down
from tests.random_programs.draw import draw
from tests.random_programs.trial import Outcome, attempt


def main() -> int:
    """Returns 1 if a program did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", help="a seed, or FIRST:STOP")
    parser.add_argument("--limit", type=float, default=90, help="seconds that a phase may take")
    parser.add_argument("--log", type=Path, help="append a line per program, and all of what failed")
    arguments = parser.parse_args()
    first, _, stop = arguments.seeds.partition(":")
    seeds = range(int(first), int(stop) if stop else int(first) + 1)
    ends: Counter[str] = Counter()
    for seed in seeds:
        program = draw(seed)
        if len(seeds) == 1:
            print(program.describe(), flush=True)
        try:
            outcome = attempt(program, arguments.limit)
        except Exception:  # the program's own side failed: reported like every other end
            outcome = Outcome("failed", traceback.format_exc(), 0.0)
        ends[outcome.kind] += 1
        _say(seed, outcome, program.describe(), arguments.log, everything=len(seeds) == 1)
    print(f"{len(seeds)} programs: {dict(ends)}", flush=True)
    shut_down()
    return int(bool(ends["different"] + ends["failed"]))


def _say(seed: int, outcome: Outcome, description: str, log: Path | None, *, everything: bool) -> None:
    line = f"{seed} {outcome.kind} {outcome.seconds:.1f}s"
    if outcome.kind in ("refused", "undecided"):
        line += " " + " ".join(outcome.text.split())[:300]
    text = f"{line}\n{description}\n{outcome.text}\n" if outcome.is_finding else f"{line}\n"
    print(text if everything or not outcome.is_finding else line, end="", flush=True)
    if outcome.is_finding and not everything:
        print(flush=True)
    if log is not None:
        with log.open("a") as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(main())

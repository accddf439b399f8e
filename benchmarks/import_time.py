"""Times `import deepspeed` after `import torch`: the median of fresh processes with a warm file cache.

    python benchmarks/import_time.py [--repeats 5]

The exit code is 1 if the goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

GOAL = 0.3

MEASURE = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import deepspeed
end = time.perf_counter()
deepspeed.initialize
print(middle - start, end - middle, time.perf_counter() - end)
"""


def measure() -> list[float]:
    """Returns the seconds of a fresh process for torch, for deepspeed after it, and for its lazily loaded modules."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    return [float(seconds) for seconds in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    measure()  # fills the file cache
    runs = [measure() for _ in range(arguments.repeats)]
    torch_median, own_median, use_median = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"import torch                 {torch_median:.3f} s")
    print(f"import deepspeed after it    {own_median:.3f} s   (goal: at most {GOAL} s)")
    print(f"first deepspeed.initialize   {use_median:.3f} s   (access to the name, which loads its modules)")
    sys.exit(own_median > GOAL)


if __name__ == "__main__":
    main()

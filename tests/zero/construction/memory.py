"""Watching the private anonymous memory of several processes from outside: mapped file pages do not count."""

import subprocess
import sys

_SAMPLER = """
import sys, time
files = [open(f"/proc/{pid}/status") for pid in sys.argv[1:]]
def total():
    found = 0
    for file in files:
        file.seek(0)
        found += next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
    return found * 1024
first = peak = total()
print("ready", flush=True)
import select
while not select.select([sys.stdin], [], [], 0.001)[0]:
    peak = max(peak, total())
print(first, peak, total(), flush=True)
"""


class AnonymousMemory:
    """The sum over processes of what only they have in memory, sampled every millisecond or so.

    Attributes:
        first: Bytes at the start.
        peak: Most bytes at any sample.
        last: Bytes at the end.
    """

    first = peak = last = 0

    def __init__(self, pids: list[int]) -> None:
        self._sampler = subprocess.Popen(
            [sys.executable, "-S", "-c", _SAMPLER, *map(str, pids)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._sampler.stdout is not None and self._sampler.stdout.readline().strip() == "ready"

    def stop(self) -> None:
        out, _ = self._sampler.communicate("stop\n", timeout=30)
        self.first, self.peak, self.last = map(int, out.split())

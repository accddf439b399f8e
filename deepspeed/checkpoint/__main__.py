"""``python -m deepspeed.checkpoint inspect DIR``."""

from __future__ import annotations

import sys

from deepspeed.checkpoint.inspect import main


def run(arguments: list[str]) -> int:
    """Runs the command; ``inspect`` is the only one."""
    prog = "python -m deepspeed.checkpoint inspect"
    if not arguments or arguments[0] != "inspect":
        sys.stderr.write(f"usage: {prog} DIR [-t TAG] [-p] [--verify]\n")
        return 2
    return main(arguments[1:], prog)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

"""``ds_inspect``: shows the content of a checkpoint."""

from __future__ import annotations

import sys

from deepspeed.checkpoint import inspect


def main() -> None:
    """Runs the command and exits with its code."""
    sys.exit(inspect.main())


if __name__ == "__main__":
    main()

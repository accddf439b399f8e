"""``ds_inspect``: shows the content of a checkpoint."""

from __future__ import annotations

from deepspeed.checkpoint import inspect
from deepspeed.cli.command import run_command


def main() -> None:
    """Runs the command; exits with its code if that is not 0."""
    run_command("ds_inspect", inspect.main, None)


if __name__ == "__main__":
    main()

"""Commands whose names are installed and whose work comes with a later release: one sentence each."""

from __future__ import annotations

import os
import sys

_COMMANDS = {
    "ds_bench": "measuring communication; benchmarks/ in the source repository measures training",
    "ds_nvme_tune": "tuning file transfers; ds_io measures one choice of aio settings",
}


def main() -> None:
    """Says what the command it was called as will do one day, and exits with 1."""
    name = os.path.basename(sys.argv[0]).removesuffix(".exe")
    purpose = _COMMANDS.get(name, "this command")
    sys.exit(f"{name}: comes with a later release ({purpose}).")

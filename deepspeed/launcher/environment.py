"""The environment variables of each rank."""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepspeed.logging import logger

SECRET = "DS_RUN_SECRET"
"""The variable with the secret of a run's launchers, see :mod:`.handshake`. It is not passed to ranks."""

_LOADED_CODE = ("LD_", "DYLD_", "PYTHON")  # prefixes of variables that decide which code a program loads


@dataclass(frozen=True)
class LaunchWorld:
    """Which of all ranks one launcher starts.

    A launcher starts all ranks of its machine, or a single one where MPI or Slurm starts a launcher per rank.
    """

    sizes: tuple[int, ...]  # ranks that each launcher of the run starts
    launcher: int  # index of this launcher among them
    first_local_rank: int  # local rank of the first rank it starts
    local_size: int  # ranks on this machine
    node_rank: int  # index of this machine
    num_nodes: int  # total number of machines
    master_addr: str  # address of rank 0
    master_port: int
    run_id: str = ""  # name of the run, the same for all its launchers; empty if they were started by hand

    @property
    def world_size(self) -> int:
        """Returns the total number of ranks."""
        return sum(self.sizes)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Returns (rank, local rank) of every rank that this launcher starts."""
        first = sum(self.sizes[: self.launcher])
        return [(first + i, self.first_local_rank + i) for i in range(self.sizes[self.launcher])]

    def variables(self, rank: int, local_rank: int) -> dict[str, str]:
        """Returns the variables that describe one rank (``RANK``, ``WORLD_SIZE`` and so on)."""
        name = {"DS_RUN_ID": self.run_id} if self.run_id else {}
        return {
            **name,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_SIZE": str(self.local_size),
            "CROSS_RANK": str(self.node_rank),
            "CROSS_SIZE": str(self.num_nodes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def new_run_id() -> str:
    """Returns a unique name for a run."""
    return uuid.uuid4().hex[:12]


def new_secret() -> str:
    """Returns the secret by which the launchers of a run recognize each other."""
    return secrets.token_hex(16)


def environment_file_name() -> str:
    """Returns the name of the file whose variables all ranks get: ``DS_ENV_FILE``, or ``.deepspeed_env``."""
    return os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def read_environment_files(name: str) -> dict[str, str]:
    """Reads ``KEY=value`` lines of the file ``name`` in the home and the current directory (which wins).

    Other tools append to this file without quoting, so malformed lines are skipped with a warning.
    """
    found: dict[str, str] = {}
    for folder in dict.fromkeys((Path.home(), Path.cwd())):
        path = folder / name
        if not path.is_file():
            continue
        here: dict[str, str] = {}
        for number, raw in enumerate(os.fsdecode(path.read_bytes()).splitlines(), 1):
            line = raw.strip()
            if not line or line.startswith("#"):
                continue
            key, equals, value = line.partition("=")
            if not equals or not key.strip():
                logger.warning(f"{path}, line {number}: expected KEY=value, skipped {line!r}")
                continue
            here[key.strip()] = value.strip()
        loaded = [key for key in here if key.startswith(_LOADED_CODE)]
        found.update(here)
        if loaded and folder != Path.home():
            logger.warning(
                f"{path}: sets {', '.join(loaded)}, which decide what code every rank loads. The file lies in the "
                "current directory and not in your home; make sure that you trust its author"
            )
    return found


def threads_per_rank(environment: Mapping[str, str], cores: int, ranks: int) -> dict[str, str]:
    """Returns ``OMP_NUM_THREADS`` for ranks that share the processors, unless the user has set it."""
    if "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks))}


def screen_width(label: int) -> dict[str, str]:
    """Returns ``COLUMNS`` for ranks whose output passes through our pipe: progress bars then fit beside the label."""
    for descriptor in (2, 1):
        if os.isatty(descriptor):
            columns = os.get_terminal_size(descriptor).columns
            return {"COLUMNS": str(max(20, columns - label))} if columns else {}
    return {}

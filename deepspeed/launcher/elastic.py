"""Runs that go on when ranks or machines come and go: torch's elastic agent starts, watches and restarts the ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.launcher.resources import LauncherError

# Failures of ranks that a run survives.
MAX_RESTARTS = 100


@dataclass(frozen=True)
class Elastic:
    """Between how many machines a run may have.

    Attributes:
        min_nodes: It waits until so many are there.
        max_nodes: No more are taken in.
    """

    min_nodes: int
    max_nodes: int

    @classmethod
    def from_options(cls, min_nodes: int, max_nodes: int, nodes: int) -> Elastic:
        """From ``--min_elastic_nodes`` and ``--max_elastic_nodes`` (-1: not given) for ``nodes`` machines.

        Raises:
            LauncherError: The numbers contradict each other.
        """
        least = 1 if min_nodes == -1 else min_nodes
        most = max(nodes, least) if max_nodes == -1 else max_nodes
        if not 1 <= least <= most:
            raise LauncherError(
                f"--min_elastic_nodes {least}, --max_elastic_nodes {most}: expected 1 <= minimum <= maximum; correct "
                "them, or leave them out for 1 up to all machines"
            )
        return cls(least, most)


def agent_command(
    elastic: Elastic,
    local_size: int,
    address: str,
    port: int,
    run_id: str,
    script: Sequence[str],
    flags: Sequence[str] = (),
) -> tuple[str, ...]:
    """The command of torch's elastic agent for one machine.

    Args:
        elastic: How many machines.
        local_size: Ranks per machine.
        address: Where the machines meet: the first one.
        port: Its port.
        run_id: Name of the run: agents of another one are not let in.
        script: The script and its arguments.
        flags: ``--module`` or ``--no_python``.
    """
    spelled = {"--no_python": "--no-python"}
    # On one machine its own name need not mean anything to the resolver.
    local = ["--local-addr=127.0.0.1"] if address in ("127.0.0.1", "localhost") else []
    return (
        sys.executable, "-u", "-m", "torch.distributed.run",
        f"--nnodes={elastic.min_nodes}:{elastic.max_nodes}", f"--nproc-per-node={local_size}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}", f"--rdzv-id={run_id}",
        *local, f"--max-restarts={MAX_RESTARTS}", *(spelled.get(flag, flag) for flag in flags), *script,
    )  # fmt: skip

"""``DSElasticAgent``: torch's elastic agent, with extra environment variables and an error if a worker fails."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed.elastic.agent.server import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from typing_extensions import override


class DSElasticAgent(LocalElasticAgent):
    """Starts and monitors the workers of a node; restarts all of them if one fails or the set of nodes changes.

    Only the environment and the end of :meth:`run` differ from torch's agent.

    Args:
        spec: The workers, their rendezvous and the number of restarts.
        env: Environment variables for the workers, in addition to those of this process and of torch.
        start_method: Start method of workers that are functions: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        exit_barrier_timeout: Seconds for which the agents wait for each other at the end.
        log_dir: Folder for redirected output of the workers; None: a temporary folder.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        env: Mapping[str, str],
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300,
        log_dir: str | None = None,
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=log_dir), start_method, exit_barrier_timeout)
        self.ds_env = {name: str(value) for name, value in env.items()}

    @override
    def run(self, role: str = "default") -> RunResult:
        """Runs the workers to their end.

        Raises:
            ChildFailedError: A worker failed after ``spec.max_restarts`` restarts.
        """
        with _variables(self.ds_env):
            result = super().run(role)
        # Raises, because a program that ignores the result would exit with 0.
        if result is not None and result.is_failed():
            spec = self.get_worker_group().spec
            raise ChildFailedError(str(spec.entrypoint or spec.get_entrypoint_name()), result.failures)
        return result


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables, which the workers inherit, on entry and restores them on exit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""``DSElasticAgent``: torch's elastic agent with the environment of a run and a result that cannot be overlooked."""

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
    """Starts the workers of a machine, watches them, and starts all again when one fails or the machines change.

    Everything but the environment and the end of :meth:`run` is torch's, by its public names.

    Args:
        spec: The workers, their rendezvous and how often they are restarted.
        env: Variables that the workers find besides those of this process and torch's own.
        start_method: How workers that are functions are started: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        exit_barrier_timeout: How long the agents wait for each other at the end, in seconds.
        log_dir: Folder for what workers write, where the caller redirects it; None: a temporary one.
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
            ChildFailedError: A worker failed once more than ``spec.max_restarts`` allows.
        """
        with _variables(self.ds_env):
            result = super().run(role)
        # A program that drops the result must not exit with 0.
        if result is not None and result.is_failed():
            spec = self.get_worker_group().spec
            raise ChildFailedError(str(spec.entrypoint or spec.get_entrypoint_name()), result.failures)
        return result


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process, which torch hands on to workers, and puts the old ones back."""
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

"""A class per program that starts ranks on several machines, for programs that build the commands themselves.

The ``deepspeed`` command does not use these classes (see :mod:`.runner`); both use the builders of :mod:`.remote`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

from deepspeed.launcher.environment import new_run_id, new_secret
from deepspeed.launcher.remote import BUILDERS, LAUNCHER_PROGRAMS, Command, RemoteRun
from deepspeed.launcher.resources import LauncherError, decode_world_info
from deepspeed.launcher.runner import rank_options
from deepspeed.ports import DEFAULT_PORT

Resources = Mapping[str, int | Sequence[int | str]]


class MultiNodeRunner:
    """The command that starts a run. ``resource_pool`` (slots per machine) may be unknown until :meth:`get_cmd`."""

    launcher: ClassVar[str]

    def __init__(
        self, args: argparse.Namespace, world_info_base64: str, resource_pool: Resources | None = None
    ) -> None:
        self.args = args
        self.world_info_base64 = world_info_base64
        self.resource_pool = resource_pool
        self.user_arguments = list(args.user_args)
        self.user_script = args.user_script
        self.exports: dict[str, str] = {}  # variables of the ranks

    @property
    def name(self) -> str:
        """Returns the value of ``--launcher`` that selects this runner."""
        return self.launcher

    def backend_exists(self) -> bool:
        """Returns whether the program is installed here."""
        return shutil.which(LAUNCHER_PROGRAMS[self.launcher]) is not None

    def add_export(self, key: str, var: str) -> None:
        """Adds a variable that the ranks get."""
        self.exports[key.strip()] = var.strip()

    def validate_args(self) -> None:
        """Raises if the program cannot do what ``args`` request; :meth:`get_cmd` checks again with the machines."""
        self._command(self._run(decode_world_info(self.world_info_base64)))

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> Any:
        """Returns the command as words; adds its variables to ``environment``. Resources: slots, or how many.

        Raises:
            LauncherError: The program cannot start such a run.
        """
        return self._words(self._run(active_resources), environment)

    def _words(self, run: RemoteRun, environment: MutableMapping[str, str]) -> list[str]:
        command = self._command(run)
        environment.update(command.variables)
        return list(command.program)

    def _command(self, run: RemoteRun) -> Command:
        (command,) = BUILDERS[self.launcher](run)
        return command

    def _run(self, resources: Resources) -> RemoteRun:
        hosts: dict[str, list[int | str]] = {
            host: list(range(slots)) if isinstance(slots, int) else list(slots) for host, slots in resources.items()
        }
        if not hosts:
            raise LauncherError(f"{type(self).__name__}: there are no machines; give at least one with its slots")
        address = self.args.master_addr or ("" if self.launcher == "slurm" else next(iter(hosts)))
        return RemoteRun(
            hosts=hosts,
            master_addr=address,
            master_port=self.args.master_port or DEFAULT_PORT,
            exports=dict(self.exports),
            folder=os.getcwd(),
            options=tuple(rank_options(self.args)),
            script=(self.user_script, *self.user_arguments),
            run_id=new_run_id(),
            secret=new_secret(),
            launcher_args=tuple(shlex.split(self.args.launcher_args)),
            ssh_port=self.args.ssh_port,
            venv_script=self.args.venv_script,
        )


class PDSHRunner(MultiNodeRunner):
    """pdsh: one launcher per machine."""

    launcher = "pdsh"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> Any:
        """Returns three things: the command, one that ends the launchers of this run, and the environment."""
        run = self._run(active_resources)
        # The launchers end their ranks. The brackets keep the pattern from matching the shell that runs pkill.
        kill = f"pkill -f {shlex.quote(f'deepspeed.launcher.launc[h] .*--run_id={run.run_id}')}"
        return self._words(run, environment), ["pdsh", "-R", "ssh", "-w", ",".join(run.hosts), kill], environment


class OpenMPIRunner(MultiNodeRunner):
    """Open MPI's mpirun."""

    launcher = "openmpi"


class MPICHRunner(MultiNodeRunner):
    """MPICH's mpirun."""

    launcher = "mpich"


class IMPIRunner(MultiNodeRunner):
    """Intel MPI's mpirun."""

    launcher = "impi"


class MVAPICHRunner(MultiNodeRunner):
    """MVAPICH's mpirun."""

    launcher = "mvapich"


class SlurmRunner(MultiNodeRunner):
    """Slurm's srun."""

    launcher = "slurm"

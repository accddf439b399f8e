"""The commands that start a run on several machines, one builder per program.

The functions are pure: they turn a :class:`RemoteRun` into commands, which ``--dry_run`` shows and tests compare.

- pdsh and ssh start one launcher per machine (``--node_rank``), which starts the ranks there.
- MPI and Slurm start one launcher per rank (``--placed_by``), so that a rank may use MPI itself.

In both cases the launchers are connected (:mod:`.link`) and report a failure once, as on one machine.

Every user of a machine can read the command lines of its processes. The values of variables and the run's secret must
not appear there: ssh gets its script by standard input, and MPI and Slurm pass on their own environment. Only pdsh has
them in its command line.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from deepspeed.launcher.environment import SECRET
from deepspeed.launcher.resources import LauncherError, check_host_name, encode_world_info

_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Hydra's options for the whole environment are mutually exclusive.
_HYDRA_ENVIRONMENT = ("-genvall", "-genvnone", "-genvlist")


@dataclass(frozen=True)
class RemoteRun:
    """All settings of a run on several machines.

    Raises:
        LauncherError: The name of a host or variable has characters that a program or shell would interpret.
    """

    hosts: dict[str, list[int | str]]  # slots of each machine, in the order of the ranks
    master_addr: str  # address of rank 0; empty to let Slurm choose
    master_port: int
    exports: dict[str, str]  # variables of the ranks
    folder: str  # the working directory
    options: tuple[str, ...]  # further options of ``deepspeed.launcher.launch``
    script: tuple[str, ...]  # the script and its arguments
    run_id: str  # name of the run
    secret: str = field(default="", repr=False)  # the secret of its launchers
    launcher_args: tuple[str, ...] = ()  # further arguments of the program that starts the launchers
    ssh_port: int | None = None  # port of the ssh servers; None for their own choice
    venv_script: str | None = None  # sourced on each machine before anything else

    def __post_init__(self) -> None:
        for host in self.hosts:
            check_host_name(host, "hosts")
        for name in self.exports:
            if not is_variable(name):
                raise LauncherError(
                    f"exported variable {name!r}: expected a name of letters, digits and underscores that does not "
                    "begin with a digit; rename or remove it"
                )

    @property
    def variables(self) -> dict[str, str]:
        """Returns the environment of the launchers on the machines."""
        return {**self.exports, **({SECRET: self.secret} if self.secret else {})}

    @property
    def world_size(self) -> int:
        """Returns the total number of ranks."""
        return sum(len(slots) for slots in self.hosts.values())

    def node_launcher(self, *place: str) -> list[str]:
        """Returns the command that starts ranks; ``place`` selects them."""
        return [
            sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={encode_world_info(self.hosts)}",
            f"--master_addr={self.master_addr}", f"--master_port={self.master_port}", f"--run_id={self.run_id}",
            "--shares_screen", *place, *self.options, *self.script,
        ]  # fmt: skip

    def shell_line(self, *place: str, escape: Callable[[str], str] = lambda text: text) -> str:
        """Returns the line for a shell on another machine: variables, directory, and the command that starts ranks."""
        parts = [f"export {name}={shlex.quote(value)};" for name, value in self.variables.items()]
        parts.append(f"cd {shlex.quote(self.folder)} &&")
        if self.venv_script:
            parts.append(f". {shlex.quote(self.venv_script)} &&")
        words = [word if word in place else escape(shlex.quote(word)) for word in self.node_launcher(*place)]
        return " ".join([*(escape(part) for part in parts), "exec", *words])


@dataclass(frozen=True)
class Command:
    """One command of a run."""

    program: tuple[str, ...]  # its program and arguments
    variables: dict[str, str] = field(default_factory=dict)  # added to its environment
    host: str | None = None  # the machine it is for; None for all of them
    script: str | None = None  # its standard input; None: empty

    def __str__(self) -> str:
        """Returns the command as it would be typed into a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        script = [] if self.script is None else ["<<<", shlex.quote(self.script)]
        return " ".join([*words, shlex.join(self.program), *script])


def is_variable(name: str) -> bool:
    """Returns whether every shell takes ``name`` for the name of a variable."""
    return _VARIABLE.fullmatch(name) is not None


def pdsh(run: RemoteRun) -> list[Command]:
    """Returns the command of one pdsh, which replaces ``%n`` by the number of the machine."""
    variables = {"PDSH_RCMD_TYPE": "ssh"}
    if run.ssh_port is not None:
        variables["PDSH_SSH_ARGS_APPEND"] = f"-p {run.ssh_port}"
    # Other percent signs are literal.
    line = run.shell_line("--node_rank=%n", escape=lambda text: text.replace("%", "%%"))
    fan_out = ["-f", "1024", "-w", ",".join(run.hosts)]
    return [Command(("pdsh", "-S", *fan_out, *run.launcher_args, line), variables)]


def ssh(run: RemoteRun) -> list[Command]:
    """Returns the commands of one ssh per machine. The user's shell there reads the script from standard input."""
    port = ("-p", str(run.ssh_port)) if run.ssh_port is not None else ()
    return [
        Command(
            ("ssh", "-o", "BatchMode=yes", *port, *run.launcher_args, "--", host, "exec $SHELL"),
            host=host,
            script=run.shell_line(f"--node_rank={index}"),
        )
        for index, host in enumerate(run.hosts)
    ]


def openmpi(run: RemoteRun) -> list[Command]:
    """Returns the command of Open MPI's mpirun, which must not bind each rank to one core, as torch starts threads."""
    defaults = _unless_chosen(run, ("--map-by", "slot"), ("--bind-to", "none"))
    exports = [word for name in run.variables for word in ("-x", name)]  # with the values that mpirun itself has
    head = ("mpirun", "-n", str(run.world_size), "--host", _host_slots(run))
    words = (*head, *defaults, *exports, *run.launcher_args, *run.node_launcher("--placed_by=openmpi"))
    return [Command(words, run.variables)]


def mpich(run: RemoteRun) -> list[Command]:
    """Returns the command of MPICH's mpirun (Hydra)."""
    return [_hydra(run, "mpich", "-hosts", _host_slots(run))]


def impi(run: RemoteRun) -> list[Command]:
    """Returns the command of Intel MPI's mpirun, a Hydra that takes an even number of ranks per machine."""
    return [_hydra(run, "impi", "-hosts", ",".join(run.hosts), "-ppn", str(_even_slots(run, "impi")))]


def mvapich(run: RemoteRun) -> list[Command]:
    """Returns the command of MVAPICH's mpirun (Hydra), with what its library needs under Python."""
    # Loading the library late, and no binding of all ranks to the first cores.
    needed = {"MV2_SUPPORT_DL": "1", "MV2_ENABLE_AFFINITY": "0"}
    return [_hydra(run, "mvapich", "-hosts", _host_slots(run), needed=needed)]


def slurm(run: RemoteRun) -> list[Command]:
    """Returns the command of Slurm's srun, which passes its own environment on."""
    per_node = _even_slots(run, "slurm")
    head = (
        "srun", f"--nodes={len(run.hosts)}", f"--ntasks={run.world_size}", f"--ntasks-per-node={per_node}",
        f"--nodelist={','.join(run.hosts)}", "--distribution=block",
    )  # fmt: skip
    return [Command((*head, *run.launcher_args, *run.node_launcher("--placed_by=slurm")), run.variables)]


def _hydra(run: RemoteRun, name: str, *where: str, needed: dict[str, str] | None = None) -> Command:
    words = [word for key, value in (needed or {}).items() for word in ("-genv", key, value)]
    environment = () if set(_HYDRA_ENVIRONMENT) & set(run.launcher_args) else ("-genvall",)
    head = ("mpirun", "-n", str(run.world_size), *where, *environment, *words)
    return Command((*head, *run.launcher_args, *run.node_launcher(f"--placed_by={name}")), run.variables)


def _host_slots(run: RemoteRun) -> str:
    return ",".join(f"{host}:{len(slots)}" for host, slots in run.hosts.items())


def _even_slots(run: RemoteRun, name: str) -> int:
    counts = {host: len(slots) for host, slots in run.hosts.items()}
    if len(set(counts.values())) > 1:
        raise LauncherError(
            f"--launcher {name}: it starts the same number of ranks on each machine, found {counts}; use --num_gpus N "
            "or --include for an even selection, or another launcher"
        )
    return next(iter(counts.values()))


def _unless_chosen(run: RemoteRun, *options: tuple[str, str]) -> list[str]:
    """Returns the default options, without those that the user's arguments set."""
    chosen = {word.partition("=")[0].replace("--", "-") for word in run.launcher_args}
    return [word for option in options if option[0].replace("--", "-") not in chosen for word in option]


# The programs that each launcher needs on this machine.
LAUNCHER_PROGRAMS = {
    "pdsh": "pdsh",
    "openmpi": "mpirun",
    "mpich": "mpirun",
    "impi": "mpirun",
    "mvapich": "mpirun",
    "slurm": "srun",
    "ssh": "ssh",
}
BUILDERS: dict[str, Callable[[RemoteRun], list[Command]]] = {
    builder.__name__: builder for builder in (pdsh, openmpi, mpich, impi, mvapich, slurm, ssh)
}

"""Tests that need a program of the system: skipped without it, and listed by name when the session ends."""

import shutil

import pytest

# What to install on Debian and Ubuntu.
_PACKAGES = {
    "mpirun.openmpi": "openmpi-bin",
    "mpirun.mpich": "mpich",
    "mpiexec.hydra": "mpich",
    "pdsh": "pdsh",
    "chromium": "chromium",
    "fio": "fio",
    "srun": "slurm-client",
    "sshd": "openssh-server",
    "slurmctld": "slurm-wlm",
}
PREFIX = "needs the program"


def needs_program(name: str) -> pytest.MarkDecorator:
    """Skips a test where ``name`` is not in ``PATH``."""
    reason = f"{PREFIX} {name}, which is not in PATH (Debian package {_PACKAGES.get(name, name)})"
    return pytest.mark.skipif(shutil.which(name) is None, reason=reason)

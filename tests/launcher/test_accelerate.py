"""What ``accelerate launch`` builds is accepted, and what it writes into the environment file arrives."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.launcher import launch, runner
from deepspeed.launcher.resources import decode_world_info
from deepspeed.ports import free_port
from tests.launcher.processes import Launcher

launching = pytest.importorskip(
    "accelerate.commands.launch", reason="accelerate, whose releases need Python 3.11, is not installed"
)
ROOT = Path(__file__).parents[2]


def built(*options):
    """The ``deepspeed`` command that ``accelerate launch`` builds, as its own code does it."""
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    parser = launching.launch_command_parser()
    machine = [
        "--use_deepspeed",
        "--num_machines=2",
        "--num_processes=4",
        "--mixed_precision=no",
        "--dynamo_backend=no",
    ]
    args = parser.parse_args([*machine, *options, "train.py", "--lr", "0.1"])
    args.deepspeed_fields_from_accelerate_config = ""
    args.use_parallelism_config = False
    return prepare_deepspeed_cmd_env(args)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi", "mvapich", "mpich", "slurm", "nossh"])
@pytest.mark.parametrize(
    "options", [(), ("--deepspeed_exclusion_filter=b:1",), ("--deepspeed_inclusion_filter=a@b:0,1",), ("--module",)]
)
def test_every_command_line(folder, capsys, launcher, options):
    if launcher == "slurm" and "--deepspeed_exclusion_filter=b:1" in options:
        options = ("--deepspeed_exclusion_filter=b",)  # srun starts equally many everywhere
    port = free_port()
    command, environment = built(
        f"--deepspeed_multinode_launcher={launcher}", "--deepspeed_hostfile=hosts", "--machine_rank=1",
        "--main_process_ip=10.0.0.1", f"--main_process_port={port}", "--zero_stage=3", *options,
    )  # fmt: skip
    assert command[0] == "deepspeed" and environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    runner.main(["--dry_run", *command[1:]])
    (line,) = capsys.readouterr().out.splitlines()
    words = shlex.split(line)
    if launcher == "pdsh":
        words = shlex.split(words[-1].replace("%n", "1"))
    args = launch.parse_args(words[words.index("deepspeed.launcher.launch") + 1 :])
    assert args.training_script_args == ["--lr", "0.1"] and args.module == ("--module" in options)
    assert args.master_addr == "10.0.0.1" and args.master_port == port
    assert args.node_rank == 1 if launcher in ("pdsh", "nossh") else args.placed_by == launcher
    slots = {"a": [0, 1], "b": [0, 1]}
    if any("exclusion" in option for option in options):
        slots = {"a": [0, 1], "b": [0]} if launcher != "slurm" else {"a": [0, 1]}
    assert decode_world_info(args.world_info) == slots


def test_without_a_host_file_local_devices_are_taken(folder, capsys):
    command, _ = built(
        "--deepspeed_multinode_launcher=pdsh", "--main_process_ip=10.0.0.1", "--machine_rank=0",
        f"--main_process_port={free_port()}",
    )  # fmt: skip
    assert command[1:3] == ["--hostfile", "None"]
    runner.main(["--dry_run", *command[1:]])
    assert "deepspeed.launcher.launch" in capsys.readouterr().out


def test_the_environment_file_that_accelerate_writes_arrives(tmp_path):
    """The two halves of ``accelerate launch``: the file it appends to, then the command it builds."""
    from accelerate.utils import convert_dict_to_env_variables

    (tmp_path / "hosts").write_text("localhost slots=1\n")
    lines = convert_dict_to_env_variables({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": "a,b"})
    (tmp_path / runner.DEEPSPEED_ENVIRONMENT_NAME).write_text("".join(lines))
    launcher = Launcher(
        tmp_path, "print(os.environ['ACCELERATE_CONFIG_DS_FIELDS'])", "--hostfile", "hosts", "--no_local_rank",
        "--launcher", "pdsh", "--num_gpus", "1", "--master_port", str(free_port()),
        environment={"ACCELERATE_CONFIG_DS_FIELDS": None},
    )  # fmt: skip
    assert launcher.finish()[:2] == (0, "a,b\n")


@pytest.mark.slow
def test_accelerate_launch_on_one_machine(tmp_path):
    """The command line itself; on one machine accelerate starts the ranks through torch."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, deepspeed\n"
        "deepspeed.init_distributed()\ndeepspeed.comm.barrier()\n"
        "print(os.environ['ACCELERATE_DEEPSPEED_ZERO_STAGE'], deepspeed.comm.get_world_size())\n"
        "deepspeed.comm.destroy_process_group()\n"
    )
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_machines=1", "--num_processes=2",
        "--mixed_precision=no", "--dynamo_backend=no", "--zero_stage=2", f"--main_process_port={free_port()}",
        str(script),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "HOME": str(tmp_path)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"] * 2 and "found by torchrun variables" in done.stderr

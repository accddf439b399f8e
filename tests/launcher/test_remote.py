"""What each launcher would execute, as ``--dry_run`` prints it, and the options of the public interface."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.launcher import front, launch, runner
from deepspeed.launcher.multinode_runner import (
    IMPIRunner,
    MPICHRunner,
    MVAPICHRunner,
    OpenMPIRunner,
    PDSHRunner,
    SlurmRunner,
)
from deepspeed.launcher.remote import BUILDERS, Command, RemoteRun
from deepspeed.launcher.resources import LauncherError, decode_world_info
from deepspeed.launcher.selection import slots_of_allocation

SCRIPT = ("train.py", "--lr", "1e-3", "two words", "100%")


@pytest.fixture(autouse=True)
def machines(monkeypatch, tmp_path):
    """Two machines in a host file, and an environment of which only some variables matter."""
    for name in ("PYTHONPATH", "NCCL_DEBUG", "MLFLOW_URI", "UNRELATED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("worker-1 slots=4\nworker-2 slots=4\n")


def dry_run(capsys, *options, script=SCRIPT):
    """The lines that the command prints, split as a shell would."""
    runner.main(["-H", "hosts", "--dry_run", "--master_port=1234", *options, *script])
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def split(words):
    """The variables in front of a command, and the command."""
    start = next(at for at, word in enumerate(words) if "=" not in word)
    return dict(word.split("=", 1) for word in words[:start]), words[start:]


def launched(words):
    """The options of the launcher that a command starts on the machines."""
    start = words.index("deepspeed.launcher.launch")
    return launch.parse_args(words[start + 1 :])


@pytest.mark.parametrize("launcher", BUILDERS)
def test_every_launcher_starts_the_same_world(capsys, launcher):
    commands = dry_run(capsys, "--launcher", launcher, "--no_local_rank", "--master_addr=10.0.0.1")
    assert len(commands) == (2 if launcher == "ssh" else 1)
    for index, words in enumerate(commands):
        if launcher in ("pdsh", "ssh"):
            assert launcher == "pdsh" or words[-3:-1] == ["exec $SHELL", "<<<"]
            line = words[-1].replace("%n", str(index)).replace("%%", "%") if launcher == "pdsh" else words[-1]
            words = shlex.split(line)
        args = launched(words)
        assert decode_world_info(args.world_info) == {"worker-1": [0, 1, 2, 3], "worker-2": [0, 1, 2, 3]}
        assert (args.master_addr, args.master_port) == ("10.0.0.1", 1234)
        assert args.no_local_rank and args.shares_screen
        assert [args.training_script, *args.training_script_args] == list(SCRIPT)
        if launcher in ("pdsh", "ssh"):
            assert args.placed_by is None and args.node_rank == (index if launcher == "ssh" else 0)
        else:
            assert args.placed_by == launcher


def test_pdsh(capsys):
    ((*words, line),) = dry_run(capsys, "--launcher_args=-u 5 -b", "--ssh_port=2222", "--venv_script=/v/activate")
    assert words[:2] == ["PDSH_RCMD_TYPE=ssh", "PDSH_SSH_ARGS_APPEND=-p 2222"]
    assert words[2:] == ["pdsh", "-S", "-f", "1024", "-w", "worker-1,worker-2", "-u", "5", "-b"]
    assert " && . /v/activate && exec " in line and " --node_rank=%n " in line and line.endswith(" 100%%")


def test_ssh(capsys):
    first, second = dry_run(capsys, "--launcher=ssh", "--ssh_port=2222", "--launcher_args=-A")
    assert first[:9] == ["ssh", "-o", "BatchMode=yes", "-p", "2222", "-A", "--", "worker-1", "exec $SHELL"]
    assert second[7] == "worker-2" and "--node_rank=1" in second[-1] and second[-1].endswith(" 100%")


def test_openmpi(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    variables, words = split(*dry_run(capsys, "--launcher=OpenMPI", "--launcher_args=--bind-to core --tag-output"))
    assert words[:7] == ["mpirun", "-n", "8", "--host", "worker-1:4,worker-2:4", "--map-by", "slot"]
    assert words.count("--bind-to") == 1 and words[words.index("--bind-to") + 1] == "core"
    assert words[words.index("NCCL_DEBUG") - 1] == "-x" and variables["NCCL_DEBUG"] == "INFO"


@pytest.mark.parametrize(
    ("launcher", "where"),
    [
        ("mpich", ["-hosts", "worker-1:4,worker-2:4", "-genvall"]),
        ("mvapich", ["-hosts", "worker-1:4,worker-2:4", "-genvall", "-genv", "MV2_SUPPORT_DL", "1"]),
        ("impi", ["-hosts", "worker-1,worker-2", "-ppn", "4", "-genvall"]),
    ],
)
def test_the_hydra_family(capsys, monkeypatch, launcher, where):
    monkeypatch.setenv("UCX_TLS", "tcp")
    variables, words = split(*dry_run(capsys, "--launcher", launcher, "--launcher_args=-verbose"))
    assert words[: 3 + len(where)] == ["mpirun", "-n", "8", *where] and "-verbose" in words
    assert variables["UCX_TLS"] == "tcp" and "tcp" not in words
    _, words = split(*dry_run(capsys, "--launcher", launcher, "--launcher_args=-genvlist UCX_TLS"))
    assert "-genvall" not in words


def test_slurm(capsys, monkeypatch):
    (words,) = dry_run(capsys, "--launcher=slurm", "--launcher_args=--mem=0")
    start = words.index("srun")
    assert words[start : start + 7] == [
        "srun", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--nodelist=worker-1,worker-2",
        "--distribution=block", "--mem=0",
    ]  # fmt: skip
    assert launched(words).master_addr == ""  # the tasks see which machine Slurm put first
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[08-10]")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    runner.main(["-H", "None", "--launcher=slurm", "--num_nodes=2", "--dry_run", *SCRIPT])
    line = capsys.readouterr().out
    assert "srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --nodelist=gpu08,gpu09 " in line


@pytest.mark.parametrize(
    ("name", "value", "count"),
    [
        ("GPUS_PER_NODE", "h100:4", 4),
        ("GPUS_PER_NODE", "a100-sxm4-80gb:4", 4),
        ("GPUS_PER_NODE", "1g.5gb:7", 7),
        ("GPUS_PER_NODE", "volta:3,kepler:5", 8),
        ("NTASKS_PER_NODE", "3", 3),
    ],
)
def test_slurm_counts_devices_of_any_type(name, value, count):
    allocation = {"SLURM_JOB_NODELIST": "a,b", f"SLURM_{name}": value, "SLURM_TASKS_PER_NODE": "1(x2)"}
    assert slots_of_allocation(allocation, -1) == {"a": count, "b": count}


def test_slurm_with_different_numbers_of_tasks():
    with pytest.raises(LauncherError, match="the number of ranks on each of 2 machine"):
        slots_of_allocation({"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "2,1"}, -1)


@pytest.mark.parametrize(("processors", "given"), [("1(x2)", True), ("8,1", True), ("2(x2)", False), ("", False)])
def test_slurm_starts_more_ranks_than_processors(capsys, monkeypatch, processors, given):
    """Else srun prints "More processors requested than permitted" in an allocation by devices alone."""
    for name, value in {
        "JOB_ID": "7",
        "JOB_NODELIST": "a,b",
        "GPUS_ON_NODE": "2",
        "JOB_CPUS_PER_NODE": processors,
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    runner.main(["-H", "None", "--launcher=slurm", "--dry_run", *SCRIPT])
    assert ("--distribution=block --overcommit " in capsys.readouterr().out) == given


def test_slurm_hands_on_the_processors_per_task(capsys, monkeypatch):
    """Srun of 22.05 and newer does not take them from the allocation."""
    known = {
        "JOB_ID": "7",
        "JOB_NODELIST": "a,b",
        "GPUS_ON_NODE": "2",
        "JOB_CPUS_PER_NODE": "16(x2)",
        "CPUS_PER_TASK": "8",
    }
    for name, value in known.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    runner.main(["-H", "None", "--launcher=slurm", "--dry_run", *SCRIPT])
    assert "--distribution=block --cpus-per-task=8 " in capsys.readouterr().out
    runner.main(["-H", "None", "--launcher=slurm", "--num_gpus=4", "--dry_run", *SCRIPT])  # more ranks than tasks
    assert "--cpus-per-task" not in capsys.readouterr().out


@pytest.mark.parametrize("launcher", ["impi", "slurm"])
def test_uneven_machines_are_refused_where_the_program_cannot(launcher):
    with pytest.raises(ValueError, match=rf"--launcher {launcher}: .* \{{'worker-1': 4, 'worker-2': 1\}}"):
        runner.main(["-H", "hosts", "--dry_run", "--launcher", launcher, "-i", "worker-1@worker-2:3", *SCRIPT])


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        (["--num_nodes=1"], {"worker-1": [0, 1, 2, 3]}),
        (["--num_gpus=2"], {"worker-1": [0, 1], "worker-2": [0, 1]}),
        (["-i", "worker-2:1,3"], {"worker-2": [1, 3]}),
        (["-e", "worker-1:0@worker-2"], {"worker-1": [1, 2, 3]}),
    ],
)
def test_selections(capsys, options, hosts):
    (words,) = dry_run(capsys, "--launcher=openmpi", *options)
    assert decode_world_info(launched(words).world_info) == hosts


def test_variables_for_other_machines(capsys, monkeypatch, tmp_path):
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=a b\nNCCL_DEBUG=from file\nNOT-A-NAME=1\n")
    for name, value in {"NCCL_DEBUG": "shell", "PYTHONPATH": "/p", "MLFLOW_URI": "m", "UNRELATED": "no"}.items():
        monkeypatch.setenv(name, value)
    variables, words = split(*dry_run(capsys, "--launcher=openmpi"))
    exported = {words[at + 1] for at, word in enumerate(words) if word == "-x"}
    expected = {
        "FROM_FILE": "a b",
        "NCCL_DEBUG": "shell",
        "PYTHONPATH": "/p",
        "MLFLOW_URI": "m",
        "DS_ACCELERATOR": "cpu",
    }
    assert expected.items() <= variables.items() and exported == variables.keys()
    assert not exported & {"UNRELATED", "NOT-A-NAME"}
    (words,) = dry_run(capsys)
    assert "export FROM_FILE='a b';" in words[-1] and f"cd {tmp_path} &&" in words[-1]


@pytest.mark.parametrize("launcher", [name for name in BUILDERS if name != "pdsh"])
def test_no_value_and_no_secret_stands_in_a_command_line(launcher, tmp_path):
    run = RemoteRun(
        {"a": [0], "b": [0]}, "a", 1, {"HF_TOKEN": "hf-value"}, "/", (), ("x.py",), "name", secret="of the run"
    )
    for command in BUILDERS[launcher](run):
        assert not any(hidden in word for word in command.program for hidden in ("hf-value", "of the run"))
        handed = command.script if launcher == "ssh" else str(command.variables)
        assert "hf-value" in handed and "of the run" in handed
    assert "of the run" not in repr(run)


def test_pdsh_names_the_values_that_it_shows(capsys, monkeypatch, tmp_path):
    (tmp_path / ".deepspeed_env").write_text("HF_TOKEN=x\n")
    texts = []
    monkeypatch.setattr(runner.logger, "warning", texts.append)
    dry_run(capsys, "--launcher=ssh")
    assert not texts
    dry_run(capsys)
    assert "the values of HF_TOKEN are in the command lines" in texts[0]


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "-F/tmp/x", "a;b", "a b", "$(x)", "^file", ""])
def test_a_host_that_is_no_name_is_refused(host):
    with pytest.raises(LauncherError, match="expected the name of a machine"):
        RemoteRun({host: [0]}, "a", 1, {}, "/", (), ("x.py",), "name")


@pytest.mark.parametrize("name", ["A B", "A;x", "1A", "", "A-B", "\u00c4"])
def test_an_export_that_is_no_variable_is_refused_in_every_runner(name):
    args = runner.parse_args(["--master_addr=a", "x.py"])
    for kind in (PDSHRunner, OpenMPIRunner, MPICHRunner, IMPIRunner, MVAPICHRunner, SlurmRunner):
        made = kind(args, "")
        made.exports[name] = "value"
        with pytest.raises(LauncherError, match="exported variable"):
            made.get_cmd({}, {"worker-1": 2})


def test_pdsh_ends_the_launchers_of_its_run_only():
    words, end, _ = PDSHRunner(runner.parse_args(["--master_addr=a", "x.py"]), "").get_cmd({}, {"worker-1": 2})
    name = re.search(r"--run_id=(\w+)", words[-1])[1]
    assert end[:-1] == ["pdsh", "-R", "ssh", "-w", "worker-1"]
    pattern = shlex.split(end[-1])[-1]
    assert end[-1].startswith("pkill -f ") and re.search(pattern, words[-1]) and not re.search(pattern, end[-1])
    assert not re.search(pattern, words[-1].replace(name, "another"))


def test_every_option_of_the_public_interface_is_accepted(capsys):
    (words,) = dry_run(
        capsys,
        "--num_nodes=2", "--num_accelerators=2", "--master_addr=m", "--launcher=pdsh", "--launcher_args=-u 1",
        "--module", "--no_local_rank", "--no_ssh_check", "--force_multi", "--save_pid",
        "--enable_each_rank_log=logs", "--autotuning=", "--bind_cores_to_rank", "--bind_core_list=0", "--ssh_port=22",
        "--venv_script=v", "--log_level=warning", "-q", "--node_rank=0",
    )  # fmt: skip
    args = launched(shlex.split(words[-1].replace("%n", "0")))
    assert args.module and args.save_pid and args.bind_cores_to_rank and args.quiet
    assert (args.enable_each_rank_log, args.bind_core_list, args.log_level) == ("logs", "0", "warning")


@pytest.mark.parametrize("options", [("--min_elastic_nodes=1", "--max_elastic_nodes=3"), ("--num_nodes=1:3",)])
def test_elastic_options_are_passed_on(capsys, options):
    (words,) = dry_run(capsys, "--elastic_training", *options)
    args = launched(shlex.split(words[-1].replace("%n", "0")))
    assert (args.enable_elastic_training, args.min_elastic_nodes, args.max_elastic_nodes) == (True, 1, 3)


def test_this_machine(capsys):
    runner.main(["-H", "None", "--num_gpus=2", "--dry_run", *SCRIPT])
    (words,) = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert decode_world_info(launched(words).world_info) == {"localhost": [0, 1]}


def test_a_first_host_that_means_each_machine_itself_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=1\nworker-2 slots=1\n")
    with pytest.raises(ValueError, match="'localhost', which every machine resolves to itself"):
        runner.main(["-H", "hosts", "--dry_run", *SCRIPT])


def test_a_missing_program_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    for launcher, program in (("pdsh", "pdsh"), ("slurm", "srun"), ("impi", "mpirun")):
        with pytest.raises(ValueError, match=f"--launcher {launcher}: the program '{program}' is not in PATH"):
            runner.main(["-H", "hosts", "--launcher", launcher, *SCRIPT])


def test_the_script_of_ssh_may_hold_any_bytes():
    """Names of folders and values of variables need not be UTF-8."""
    command = Command(("ssh",), script=os.fsdecode(b"cd /caf\xe9 && exec python"))
    with front._standard_input(command, is_only=True) as source:
        assert source.read() == b"cd /caf\xe9 && exec python\n"


@pytest.mark.parametrize(("ignores", "code"), [(True, 0), (False, 128 + signal.SIGHUP)])
def test_a_run_on_several_machines_that_nohup_has_started_survives_the_terminal(ignores, code):
    program = (
        "import signal, sys; from deepspeed.launcher.front import run_commands; "
        "from deepspeed.launcher.remote import Command; "
        f"signal.signal(signal.SIGHUP, signal.SIG_{'IGN' if ignores else 'DFL'}); "
        "sys.exit(run_commands([Command(('sh', '-c', 'kill -HUP $PPID; sleep 0.3'))], grace=0.1))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60).returncode == code

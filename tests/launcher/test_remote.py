"""What each launcher would execute, as ``--dry_run`` prints it, and the options of the public interface."""

import shlex

import pytest

from deepspeed.launcher import launch, runner
from deepspeed.launcher.remote import BUILDERS
from deepspeed.launcher.resources import decode_world_info

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
    assert first[:7] == ["ssh", "-o", "BatchMode=yes", "-p", "2222", "-A", "worker-1"]
    assert second[6] == "worker-2" and "--node_rank=1" in second[7] and second[7].endswith(" 100%")


def test_openmpi(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (words,) = dry_run(capsys, "--launcher=OpenMPI", "--launcher_args=--bind-to core --tag-output")
    assert words[:7] == ["mpirun", "-n", "8", "--host", "worker-1:4,worker-2:4", "--map-by", "slot"]
    assert words.count("--bind-to") == 1 and words[words.index("--bind-to") + 1] == "core"
    assert words[words.index("NCCL_DEBUG=INFO") - 1] == "-x"


@pytest.mark.parametrize(
    ("launcher", "where"),
    [
        ("mpich", ["-hosts", "worker-1:4,worker-2:4"]),
        ("mvapich", ["-hosts", "worker-1:4,worker-2:4", "-genv", "MV2_SUPPORT_DL", "1"]),
        ("impi", ["-hosts", "worker-1,worker-2", "-ppn", "4"]),
    ],
)
def test_the_hydra_family(capsys, monkeypatch, launcher, where):
    monkeypatch.setenv("UCX_TLS", "tcp")
    (words,) = dry_run(capsys, "--launcher", launcher, "--launcher_args=-verbose")
    assert words[: 3 + len(where)] == ["mpirun", "-n", "8", *where]
    at = words.index("UCX_TLS")
    assert words[at - 1 : at + 2] == ["-genv", "UCX_TLS", "tcp"] and "-verbose" in words


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
    (words,) = dry_run(capsys, "--launcher=openmpi")
    exported = {words[at + 1] for at, word in enumerate(words) if word == "-x"}
    assert {"FROM_FILE=a b", "NCCL_DEBUG=shell", "PYTHONPATH=/p", "MLFLOW_URI=m", "DS_ACCELERATOR=cpu"} <= exported
    assert not any(entry.startswith(("UNRELATED", "NOT-A-NAME")) for entry in exported)
    (words,) = dry_run(capsys)
    assert "export FROM_FILE='a b';" in words[-1] and f"cd {tmp_path} &&" in words[-1]


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


def test_elastic_options_are_passed_on(capsys):
    (words,) = dry_run(capsys, "--elastic_training", "--min_elastic_nodes=1", "--max_elastic_nodes=3")
    args = launched(shlex.split(words[-1].replace("%n", "0")))
    assert (args.enable_elastic_training, args.min_elastic_nodes, args.max_elastic_nodes) == (True, 1, 3)


def test_this_machine(capsys):
    runner.main(["-H", "None", "--num_gpus=2", "--dry_run", *SCRIPT])
    (words,) = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert decode_world_info(launched(words).world_info) == {"localhost": [0, 1]}


def test_a_first_host_that_means_each_machine_itself_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=1\nworker-2 slots=1\n")
    with pytest.raises(ValueError, match="'localhost', which means itself on each of them"):
        runner.main(["-H", "hosts", "--dry_run", *SCRIPT])


def test_a_missing_program_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    for launcher, program in (("pdsh", "pdsh"), ("slurm", "srun"), ("impi", "mpirun")):
        with pytest.raises(ValueError, match=f"--launcher {launcher}: the program '{program}' is not in PATH"):
            runner.main(["-H", "hosts", "--launcher", launcher, *SCRIPT])

"""What the command line refuses, each in one sentence that names the option."""

import os
import socket
import subprocess
import sys

import pytest

from deepspeed.launcher import devices, launch, runner, selection
from deepspeed.launcher.devices import LocalDevices
from deepspeed.launcher.resources import decode_world_info
from deepspeed.release import info_line

SCRIPT = __file__  # any file that exists


@pytest.fixture
def gpus(monkeypatch):
    found = LocalDevices("cuda", (4, 5, 6), ("CUDA_VISIBLE_DEVICES",))
    monkeypatch.setattr(selection, "find_devices", lambda environment, ignore_visible=False: found)


@pytest.fixture(autouse=True)
def no_torch_needed(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def world(*options):
    args = runner.parse_args([*options, SCRIPT])
    arguments = runner._launch_arguments(args, selection.select_slots(args, os.environ))
    return decode_world_info(launch.parse_args(arguments).world_info)


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ([], [4, 5, 6]),
        (["--num_gpus", "2"], [4, 5]),
        (["--num_accelerators=1"], [4]),
        (["--include=localhost:0,2"], [0, 2]),
        (["--exclude=localhost:1"], [0, 2]),
        (["--hostfile", "None", "--num_nodes=1"], [4, 5, 6]),
    ],
)
def test_devices_of_this_machine(gpus, options, slots):
    assert world(*options) == {"localhost": slots}


@pytest.mark.parametrize(
    ("options", "ranks"),
    [([], 1), (["--num_gpus=5"], 5), (["-i", "localhost:0,700"], 2), (["-i", "localhost:0@localhost:700"], 2)],
)
def test_ranks_on_the_cpu(options, ranks):
    assert len(world(*options)["localhost"]) == ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num_gpus=4"], "--num_gpus 4: this machine shows 3 cuda device"),
        (["--num_gpus=0"], "--num_gpus 0: expected at least 1"),
        (["--num_nodes=2"], "--num_nodes 2: only this machine is known"),
        (["--no_ssh"], "--no_ssh: --node_rank -1 does not identify this machine"),
        (["--no_ssh", "--node_rank=0", "--num_nodes=2"], "--no_ssh without a host file: give --master_addr"),
        (["--no_ssh", "--node_rank=1"], r"--node_rank 1: 1 machine\(s\) are known"),
        (["--no_ssh", "--node_rank=0", "--force_multi"], "--no_ssh and --force_multi exclude each other"),
        (["--min_elastic_nodes=2"], "need --elastic_training"),
        (["--num_nodes=1:2", "--no_ssh", "--node_rank=0", "--master_addr=h"], "need --elastic_training"),
        (["--num_nodes=1:2", "--elastic_training", "--max_elastic_nodes=2"], "set the same; use one"),
        (["--include=localhost:0", "--num_gpus=1"], "--num_gpus and --include/--exclude exclude each other"),
        (["--exclude=localhost:0", "--num_nodes=1"], "--num_nodes and --include/--exclude exclude each other"),
        (["--include=a", "--exclude=b"], "--include and --exclude exclude each other"),
        (["--include=localhost:3"], r"host 'localhost' has no slots \[3\]; choose from \[0, 1, 2\]"),
        (["--exclude=localhost"], "no device is left"),
        (["--include=elsewhere"], "host 'elsewhere' is unknown; name one of localhost"),
    ],
)
def test_wrong_selections_are_value_errors(gpus, options, message):
    with pytest.raises(ValueError, match=message):
        runner.main([*options, SCRIPT])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("localhost slots=4\n", [], "counts on device 3, but this machine shows 3 cuda"),
        ("localhost slots=2\n", ["--num_gpus=3"], r"gives host 'localhost' 2 slot"),
        ("localhost slots=2\n", ["--num_nodes=2"], "--num_nodes 2: .* has 1 host"),
        ("localhost slots=2\nworker-1 slots=0\n", [], "host 'worker-1' has no slots; give it some or remove"),
        ("localhost slots=2\nworker-1 slots=0\n", ["-i", "worker-1"], "--include worker-1: .* these hosts no slots"),
        ("localhost slots=2\nworker-1 slots=0\n", ["-e", "localhost"], "--exclude localhost: no slot of .* is left"),
        (
            "localhost slots=2\n",
            ["--elastic_training", "--num_nodes=2:3"],
            "elastic nodes 2: .* has 1 host",
        ),
    ],
)
def test_wrong_hostfiles(gpus, tmp_path, text, options, message):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=message):
        runner.main(["-H", str(tmp_path / "hosts"), *options, SCRIPT])


def test_one_host_that_is_this_machine_needs_no_launcher(gpus, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\nworker-1 slots=2\n")
    assert world("-H", str(hosts), "--num_nodes=1") == {"localhost": [4, 5]}
    assert world("-H", str(hosts), "-i", "localhost:1") == {"localhost": [5]}
    assert world("-H", str(hosts), "--no_ssh", "--node_rank=1") == {"localhost": [0, 1], "worker-1": [0, 1]}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", socket.gethostname(), socket.gethostname().split(".")[0]])
def test_names_and_addresses_of_this_machine(gpus, tmp_path, host):
    (tmp_path / "hosts").write_text(f"{host} slots=2\n")
    assert world("-H", str(tmp_path / "hosts")) == {"localhost": [4, 5]}


@pytest.mark.parametrize("option", ["--no_ssh", "--elastic_training", "--dry_run"])
def test_autotuning_refuses_what_it_does_not_go_with(option):
    with pytest.raises(ValueError, match="--autotuning tune: does not go with --no_ssh, --elastic_training or"):
        runner.main(["--autotuning", "tune", option, SCRIPT])


def test_the_options_of_each_start_are_those_of_the_command():
    given = [
        "--num_gpus=2",
        "--num_nodes=1",
        "--master_port=3",
        "--no_ssh_check",
        "--autotuning=tune",
        SCRIPT,
        "--num_gpus=9",
    ]
    assert runner.parse_args(given).start_options == [
        "--num_nodes=1",
        "--num_gpus=2",
        "--master_port=3",
        "--no_ssh_check",
    ]


def test_options_for_other_machines_are_accepted_with_one_line(capfd):
    runner.main(
        [
            "--launcher=pdsh",
            "--no_ssh_check",
            "--ssh_port=22",
            "--launcher_args=-x",
            "--log_level=warning",
            "--dry_run",
            SCRIPT,
        ]
    )
    (line,) = capfd.readouterr().err.splitlines()
    assert "--launcher_args, --no_ssh_check, --ssh_port: without effect" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-script.py"], "no-such-script.py: no such script in"),
        (["--module", "--no_python", "x"], "--module and --no_python exclude each other"),
    ],
)
def test_wrong_scripts(arguments, message):
    with pytest.raises(ValueError, match=message):
        runner.main(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SCRIPT], "--world_info is missing"),
        (["--world_info=eyJhIjogWzBdfQ==", "--node_rank=1", SCRIPT], r"--world_info has 1 host\(s\)"),
        (["--world_info=eyJhIjogWzBdfQ==", "--bind_core_list=3-1", SCRIPT], "--bind_core_list 3-1: expected cores"),
        (["--world_info=eyJhIjogWzBdfQ==", "--bind_core_list=99999", SCRIPT], r"cores \[99999\] are not among"),
        (
            ["--world_info=eyJhIjogWzBdfQ==", f"--enable_each_rank_log={__file__}", SCRIPT],
            r"--enable_each_rank_log .*test_runner\.py: cannot be written \(File exists\)",
        ),
        (
            ["--world_info=eyJhIjogWzBdfQ==", "--placed_by=openmpi", SCRIPT],
            "this process was not started by openmpi",
        ),
        (
            ["--world_info=eyJhIjogWzBdfQ==", "--enable_elastic_training", "--bind_cores_to_rank", SCRIPT],
            "--elastic_training and --bind_cores_to_rank exclude each other",
        ),
    ],
)
def test_wrong_node_launches(arguments, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        launch.main(arguments)


def test_on_the_command_line_a_mistake_is_one_sentence():
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_ssh", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert done.stderr.startswith("deepspeed: --no_ssh:") and done.stderr.count("\n") == 1


def test_names_that_tools_import():
    assert runner.DLTS_HOSTFILE == "/job/hostfile"
    assert runner.EXPORT_ENVS == ["MLFLOW", "PYTHON", "MV2", "UCX"]
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    assert all(hasattr(runner, name) for name in runner.__all__)


def test_nothing_of_the_launcher_the_tuner_and_reports_needs_torch():
    modules = "runner, launch, local_run, supervisor, screen, failures, resources, environment, devices, processes"
    script = (
        "import sys; import deepspeed; before = 'torch' in sys.modules; "
        f"from deepspeed.launcher import {modules}; "
        "import deepspeed.autotuning.autotuner, deepspeed.cli.report_run; "
        "assert before or 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def test_a_machine_with_a_device_file_uses_torch(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia[" in pattern else [])
    assert devices._has_device_files()


def test_without_arguments_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as end:
        runner.main([])
    assert end.value.code == 0
    assert "usage: deepspeed" in capsys.readouterr().out


def test_the_version_needs_no_script(capsys):
    with pytest.raises(SystemExit) as end:
        runner.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == info_line() + "\n"


@pytest.mark.parametrize("value", ["-1", "nan", "x"])
def test_a_grace_period_that_is_no_duration(value, capsys):
    with pytest.raises(SystemExit):
        runner.parse_args([f"--grace={value}", SCRIPT])
    assert f"expected a number of seconds of at least 0, found '{value}'" in capsys.readouterr().err

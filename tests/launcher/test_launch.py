"""Restarts by torch's elastic agent."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.launcher.launch import agent_command, elastic_nodes
from deepspeed.launcher.resources import LauncherError
from deepspeed.ports import free_port
from tests.launcher.processes import Launcher, wait_until


def test_the_agent_gets_the_options():
    command = agent_command((1, 3), 4, "host-a", 77, "name", ("x.py", "--a"), ("--no_python",))
    assert command[:4] == (sys.executable, "-u", "-m", "torch.distributed.run")
    assert {"--nnodes=1:3", "--nproc-per-node=4", "--rdzv-endpoint=host-a:77", "--no-python"} <= set(command)
    assert command[-2:] == ("x.py", "--a")


def test_numbers_of_machines():
    assert elastic_nodes(-1, -1, 3) == (1, 3)
    assert elastic_nodes(2, 5, 3) == (2, 5)
    with pytest.raises(LauncherError, match="--min_elastic_nodes 3, --max_elastic_nodes 2"):
        elastic_nodes(3, 2, 3)


def test_a_rank_that_dies_is_started_again_with_the_others(tmp_path):
    """The first time rank 1 dies; the second time both come to their end."""
    script = """
        import pathlib, signal
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"  # for torch's own init_process_group
        pathlib.Path(f"up{rank}try{count}").touch()
        while not pathlib.Path(f"up{1 - rank}try{count}").exists(): time.sleep(0.02)
        if count == "0":
            time.sleep(300 * (rank == 0)); os.kill(os.getpid(), signal.SIGKILL)
        sys.stdout.write(f"done {rank} {count} {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n")  # in one piece
    """
    options = ("--elastic_training", "--num_gpus=2", f"--master_port={free_port()}")
    code, out, err = Launcher(tmp_path, script, *options, arguments=("-x", "a b")).finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"done {rank} 1 2 ['-x', 'a b']" for rank in range(2)]
    assert "elastic run on 1 to 1 machine(s)" in err


RESUMES = """
import os, pathlib, signal, sys, torch, deepspeed
rank, killed = int(os.environ["RANK"]), [int(step) for step in sys.argv[1:]]
model = torch.nn.Linear(4, 4, bias=False)
torch.nn.init.ones_(model.weight)
settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
if pathlib.Path("saved/latest").exists():
    engine.load_checkpoint("saved")
first = engine.global_steps
while engine.global_steps < 4:
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    step = engine.global_steps
    engine.save_checkpoint("saved")
    if step in killed and rank == step % 2 and step > first:
        os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write(f"done {rank} {first} {float(model.weight.detach().sum()):.3f}\\n")
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--max-restarts=3")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("command", "agents", "killed"),
    [
        pytest.param(
            (*TORCHRUN, "--nproc-per-node=2", "--master-port={port}"), 1, (1,), id="torchrun", marks=pytest.mark.slow
        ),
        pytest.param(
            (*TORCHRUN, "--nproc-per-node=2", "--standalone"), 1, (1, 3), id="standalone", marks=pytest.mark.slow
        ),
        pytest.param(
            (sys.executable, "-m", "deepspeed.launcher.runner", "--elastic_training", "--num_gpus=2",
             "--master_port={port}", "--no_local_rank"),
            1, (1, 3), id="deepspeed", marks=pytest.mark.slow,
        ),
        # Each agent counts the restarts that its own ranks caused.
        pytest.param(
            (*TORCHRUN, "--nproc-per-node=1", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}",
             "--rdzv-id=x", "--local-addr=127.0.0.1"),
            2, (1, 3), id="two agents", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_training_continues_from_the_checkpoint_after_each_restart(tmp_path, command, agents, killed):
    """A rank is killed at each of the steps ``killed``; all are started again and end with what they would have had."""
    (tmp_path / "job.py").write_text(RESUMES)
    port = free_port()
    words = [*(word.format(port=port) for word in command), "job.py", *map(str, killed)]
    environ = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path, "env": environ}
    outcomes = [
        (process, process.communicate(timeout=280))
        for process in [subprocess.Popen(words, **pipes) for _ in range(agents)]
    ]
    assert [process.returncode for process, _ in outcomes] == [0] * agents, outcomes
    out = "".join(out for _, (out, _) in outcomes)
    assert sorted(line for line in out.splitlines() if "done" in line) == [
        f"done {rank} {killed[-1]} 14.400" for rank in range(2)
    ]


def is_listening(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_a_machine_that_is_lost_leaves_a_smaller_run(tmp_path):
    """Two machines on the loopback; the second is killed, and the first continues alone."""
    script = """
        import pathlib, torch, deepspeed
        deepspeed.init_distributed()
        size = deepspeed.comm.get_world_size()
        pathlib.Path(f"up{rank}of{size}").touch()
        while size == 2:
            deepspeed.comm.all_reduce(torch.ones(1)); time.sleep(0.02)
        print("alone", rank, size)
    """
    common = ("--elastic_training", "--min_elastic_nodes=1", "--no_ssh", "--num_nodes=2", "--num_gpus=1")
    port = free_port()
    nodes = []
    for node in range(2):
        nodes.append(
            Launcher(
                tmp_path, script, *common, "--master_addr=127.0.0.1", f"--master_port={port}", f"--node_rank={node}",
                environment={"DEEPSPEED_TIMEOUT": "0.5"},
            )
        )  # fmt: skip
        # Of two agents on one machine the first to come holds the store, which must outlive the other.
        wait_until(lambda: is_listening(port), 100, "store of the agents")
    nodes[0].wait_for_files("up0of2", "up1of2")
    for process in nodes[1].processes():
        process.kill()
    code, out, err = nodes[0].finish()
    assert code == 0, err
    assert "alone 0 1" in out
    nodes[1].finish()
    wait_until(lambda: not nodes[0].processes(), 100, "end of all processes")


@pytest.mark.slow
def test_stopping_the_launcher_stops_agent_and_ranks(tmp_path):
    script = "import pathlib; pathlib.Path(f'up{rank}').touch(); time.sleep(300)"
    launcher = Launcher(tmp_path, script, "--elastic_training", "--num_gpus=2", f"--master_port={free_port()}")
    launcher.wait_for_files("up0", "up1")
    launcher.process.terminate()
    assert launcher.finish()[0] == 143
    wait_until(lambda: not launcher.processes(), 100, "end of all processes")

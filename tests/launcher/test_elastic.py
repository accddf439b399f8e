"""Restarts by torch's elastic agent."""

import sys

import pytest

from deepspeed.launcher.elastic import Elastic, agent_command
from deepspeed.launcher.resources import LauncherError
from deepspeed.ports import free_port
from tests.launcher.processes import Launcher, wait_until

pytestmark = pytest.mark.timeout(120)


def test_the_agent_is_told_what_was_asked():
    command = agent_command(Elastic(1, 3), 4, "host-a", 77, "name", ("x.py", "--a"), ("--no_python",))
    assert command[:4] == (sys.executable, "-u", "-m", "torch.distributed.run")
    assert {"--nnodes=1:3", "--nproc-per-node=4", "--rdzv-endpoint=host-a:77", "--no-python"} <= set(command)
    assert command[-2:] == ("x.py", "--a")


def test_numbers_of_machines():
    assert Elastic.from_options(-1, -1, 3) == Elastic(1, 3)
    assert Elastic.from_options(2, 5, 3) == Elastic(2, 5)
    with pytest.raises(LauncherError, match="--min_elastic_nodes 3, --max_elastic_nodes 2"):
        Elastic.from_options(3, 2, 3)


def test_a_rank_that_dies_is_started_again_with_the_others(tmp_path):
    """The first time rank 1 dies; the second time both come to their end."""
    script = """
        import pathlib, signal
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        pathlib.Path(f"up{rank}try{count}").touch()
        while not pathlib.Path(f"up{1 - rank}try{count}").exists(): time.sleep(0.02)
        if count == "0":
            time.sleep(60 * (rank == 0)); os.kill(os.getpid(), signal.SIGKILL)
        sys.stdout.write(f"done {rank} {count} {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n")  # in one piece
    """
    options = ("--elastic_training", "--num_gpus=2", f"--master_port={free_port()}")
    code, out, err = Launcher(tmp_path, script, *options, arguments=("-x", "a b")).finish(60)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"done {rank} 1 2 ['-x', 'a b']" for rank in range(2)]
    assert "elastic run on 1 to 1 machine(s)" in err


@pytest.mark.slow
def test_collectives_work_again_after_a_restart(tmp_path):
    """The first time rank 1 dies in the middle; the second time both go on from what was saved."""
    script = """
        import pathlib, signal, torch, deepspeed
        deepspeed.init_distributed()
        saved = pathlib.Path("saved")
        for step in range(int(saved.read_text()) if saved.exists() else 0, 4):
            x = torch.ones(1); deepspeed.comm.all_reduce(x)
            if rank == 0: saved.write_text(str(step + 1))
            deepspeed.comm.barrier()
            if rank == 1 and step == 1: os.kill(os.getpid(), signal.SIGKILL)
        print("done", rank, os.environ["TORCHELASTIC_RESTART_COUNT"], x.item(), saved.read_text())
        deepspeed.comm.destroy_process_group()
    """
    launcher = Launcher(tmp_path, script, "--elastic_training", "--num_gpus=2", f"--master_port={free_port()}")
    code, out, err = launcher.finish(110)
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if "done" in line) == ["done 0 1 2.0 4", "done 1 1 2.0 4"]
    assert "elastic run on 1 to 1 machine(s)" in err and "found by torchrun variables" in err


@pytest.mark.slow
def test_a_machine_that_is_lost_leaves_a_smaller_run(tmp_path):
    """Two machines on the loopback; the second is killed, and the first goes on alone."""
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
    nodes = [
        Launcher(
            tmp_path, script, *common, "--master_addr=127.0.0.1", f"--master_port={port}", f"--node_rank={node}",
            environment={"DEEPSPEED_TIMEOUT": "0.5"},
        )
        for node in range(2)
    ]  # fmt: skip
    nodes[0].wait_for_files("up0of2", "up1of2", timeout=60)
    for process in nodes[1].processes():
        process.kill()
    code, out, err = nodes[0].finish(100)
    assert code == 0, err
    assert "alone 0 1" in out
    nodes[1].finish()
    wait_until(lambda: not nodes[0].processes(), 5, "end of all processes")


@pytest.mark.slow
def test_stopping_the_launcher_stops_agent_and_ranks(tmp_path):
    script = "import pathlib; pathlib.Path(f'up{rank}').touch(); time.sleep(60)"
    launcher = Launcher(tmp_path, script, "--elastic_training", "--num_gpus=2", f"--master_port={free_port()}")
    launcher.wait_for_files("up0", "up1", timeout=40)
    launcher.process.terminate()
    assert launcher.finish(20)[0] == 143
    wait_until(lambda: not launcher.processes(), 5, "end of all processes")

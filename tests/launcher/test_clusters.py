"""The command on machines of a cluster: it starts this machine's ranks, and leaves the reason of a failure."""

import base64
import json
import shlex

from deepspeed.launcher import runner
from deepspeed.launcher.failures import find_failure_file, write_failure
from deepspeed.ports import free_port
from tests.launcher.processes import Launcher

SKY = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
PET = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "0",
    "PET_NPROC_PER_NODE": "2",
    "PET_MASTER_ADDR": "a",
    "PET_MASTER_PORT": "7",
}


def command(capsys, monkeypatch, variables, *options):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    runner.main(["--dry_run", "-H", "no-such-file", *options, __file__])
    words = shlex.split(capsys.readouterr().out)
    found = dict(word.lstrip("-").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    world = json.loads(base64.urlsafe_b64decode(found["world_info"]))
    return (
        found.get("node_rank"),
        found["master_addr"],
        found.get("master_port"),
        [len(each) for each in world.values()],
    )


def test_a_cluster_identifies_this_machine(capsys, monkeypatch):
    assert command(capsys, monkeypatch, SKY) == ("1", "10.0.0.7", None, [2, 2])
    assert command(capsys, monkeypatch, SKY, "--num_gpus=1", "--master_port=9") == ("1", "10.0.0.7", "9", [1, 1])
    assert command(capsys, monkeypatch, {**SKY, "SKYPILOT_NODE_IPS": "10.0.0.7"}) == (None, "127.0.0.1", None, [1])


def test_torch_runtimes_give_the_port_too(capsys, monkeypatch):
    assert command(capsys, monkeypatch, PET) == ("0", "a", "7", [2, 2, 2])


def test_options_count_more_than_the_cluster(capsys, monkeypatch):
    options = ("--no_ssh", "--num_nodes=2", "--node_rank=0", "--master_addr=b")
    assert command(capsys, monkeypatch, SKY, *options) == ("0", "b", None, [1, 1])


def test_the_reason_of_a_failure_is_left_in_the_file(tmp_path):
    file = tmp_path / "reason"
    launcher = Launcher(
        tmp_path, "raise ValueError('bad batch')", "--num_gpus=2", f"--master_port={free_port()}",
        environment={"DS_FAILURE_FILE": str(file)},
    )  # fmt: skip
    code, _, err = launcher.finish()
    assert code == 1, err
    text = file.read_text()
    assert "failed first on host" in text and "ValueError: bad batch" in text and "exit code 1" in text


def test_where_the_reason_goes(tmp_path):
    assert find_failure_file({}) is None
    assert str(find_failure_file({"DS_FAILURE_FILE": "/dev/termination-log"})) == "/dev/termination-log"
    assert write_failure(tmp_path / "f", ["why"]) is None and (tmp_path / "f").read_text() == "why\n"
    assert "name a file in a folder" in write_failure(tmp_path / "nothing" / "f", ["why"])

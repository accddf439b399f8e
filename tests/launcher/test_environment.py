"""Ports, environment files, threads, and the devices of this machine."""

import os
import socket
import sys

import pytest
import torch.distributed as torch_dist

from deepspeed.launcher import devices, launch, ports
from deepspeed.launcher.devices import find_devices, visible_ids
from deepspeed.launcher.environment import LaunchWorld, read_environment_files, threads_per_rank
from deepspeed.launcher.ports import RequestedPort, agreed_port, claim_port
from deepspeed.launcher.resources import LauncherError
from deepspeed.ports import free_port


@pytest.fixture
def port_in_use():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_world_variables():
    world = LaunchWorld(
        sizes=(4, 2),
        launcher=1,
        first_local_rank=0,
        local_size=2,
        node_rank=1,
        num_nodes=2,
        master_addr="a",
        master_port=9,
    )
    assert world.places == [(4, 0), (5, 1)]
    assert world.variables(5, 1) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "9",
    }


def test_a_taken_default_port_is_replaced(monkeypatch, port_in_use):
    monkeypatch.setattr(ports, "DEFAULT_PORT", port_in_use)
    chosen = claim_port("127.0.0.1", None).port
    assert chosen != port_in_use
    # the default, passed by a tool that always does
    assert claim_port("127.0.0.1", RequestedPort.of(port_in_use)).port != port_in_use
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", chosen))


def test_a_free_port_is_kept(monkeypatch):
    free, other = free_port(), free_port()
    monkeypatch.setattr(ports, "DEFAULT_PORT", free)
    with claim_port("127.0.0.1", None) as claim, claim_port("localhost", RequestedPort.of(other)) as wished:
        assert (claim.port, wished.port) == (free, other)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ports are marked on Linux only")
@pytest.mark.parametrize("is_default", [True, False])
def test_two_launchers_do_not_choose_the_same_free_port(monkeypatch, is_default):
    free = free_port()
    if is_default:
        monkeypatch.setattr(ports, "DEFAULT_PORT", free)
    requested = None if is_default else RequestedPort.of(free)
    with claim_port("127.0.0.1", requested) as first, claim_port("127.0.0.1", requested) as second:
        assert first.port == free != second.port
        with pytest.raises(LauncherError, match="by a run that is about to start"):
            agreed_port(RequestedPort.of(free), holds_rank_0=True, is_claimed=False)
        assert agreed_port(RequestedPort.of(free), holds_rank_0=True, is_claimed=True).port == free
    with claim_port("127.0.0.1", requested) as third:
        assert third.port == free


def test_a_claimed_port_is_held_until_the_end_and_open_to_rank_0():
    free = free_port()
    with claim_port("127.0.0.1", RequestedPort.of(free)), socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("", free))
        store = torch_dist.TCPStore("127.0.0.1", free, is_master=True, wait_for_workers=False)
        assert store.port == free
        del store
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", free))


def test_a_taken_port_of_the_users_choice_is_replaced_with_a_word(monkeypatch, port_in_use):
    text = []
    monkeypatch.setattr(ports.logger, "warning", text.append)
    with claim_port("localhost", RequestedPort.of(port_in_use)) as claim:
        assert claim.port != port_in_use
    assert f"--master_port {port_in_use}: the port is taken by process {os.getpid()} on host" in text[0]
    assert f"this run uses port {claim.port} instead" in text[0]


def test_a_taken_port_that_other_machines_use_is_an_error(monkeypatch, port_in_use):
    for call in (
        lambda: claim_port("127.0.0.1", RequestedPort.of(port_in_use), is_shared=True),
        lambda: agreed_port(RequestedPort.of(port_in_use), holds_rank_0=True, is_claimed=True),
    ):
        with pytest.raises(LauncherError, match=f"--master_port {port_in_use}: the port is taken on this machine"):
            call()
    assert agreed_port(RequestedPort.of(port_in_use), holds_rank_0=False, is_claimed=True).port == port_in_use


def test_the_port_may_come_from_the_variable_of_torch():
    assert RequestedPort.of(None, {"MASTER_PORT": "4000"}) == RequestedPort(4000, "MASTER_PORT=4000")
    assert RequestedPort.of(5000, {"MASTER_PORT": "4000"}) == RequestedPort(5000, "--master_port 5000")
    assert RequestedPort.of(None, {}) is None and RequestedPort.of(0, {"MASTER_PORT": "4000"}) is None
    for option, environ, text in ((70000, {}, "--master_port 70000"), (None, {"MASTER_PORT": "x"}, "MASTER_PORT=x")):
        with pytest.raises(LauncherError, match=f"{text}: expected a port from 1 to 65535"):
            RequestedPort.of(option, environ)


def test_a_port_elsewhere_is_not_probed(port_in_use):
    for address in ("other-host.invalid", "203.0.113.9"):
        assert claim_port(address, RequestedPort.of(port_in_use)).port == port_in_use


def test_an_environment_file_of_any_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_bytes(b"# caf\xe9\nDATA=/caf\xe9\r\nNAME=caf\xc3\xa9\n")
    found = read_environment_files(".deepspeed_env")
    assert {name: os.fsencode(value) for name, value in found.items()} == {"DATA": b"/caf\xe9", "NAME": b"caf\xc3\xa9"}


def test_environment_files(tmp_path, monkeypatch, capfd):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(), here.mkdir()
    (home / ".deepspeed_env").write_text("A=home\nB=home\n")
    (here / ".deepspeed_env").write_text("# comment\n\nB = x=y \nC=\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert read_environment_files(".deepspeed_env") == {"A": "home", "B": "x=y", "C": ""}
    (here / "other").write_text("export A 1\nB=2\n")
    assert read_environment_files("other") == {"B": "2"}
    assert "other, line 1: expected KEY=value, skipped 'export A 1'" in capfd.readouterr().err


def test_variables_that_load_code_are_reported_unless_they_lie_in_the_home(tmp_path, monkeypatch, capfd):
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("PYTHONPATH=/x\n")
    read_environment_files(".deepspeed_env")
    assert "PYTHONPATH" not in capfd.readouterr().err
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / ".deepspeed_env").write_text("LD_PRELOAD=/x.so\nPYTHONSTARTUP=y\nOTHER=1\n")
    read_environment_files(".deepspeed_env")
    text = capfd.readouterr().err
    assert "here/.deepspeed_env: sets LD_PRELOAD, PYTHONSTARTUP, which decide what code" in text and "OTHER" not in text


@pytest.mark.parametrize("planted", ["nothing", "old file", "link", "dangling link", "directory"])
def test_the_pid_file_is_new_and_follows_no_link(tmp_path, monkeypatch, planted):
    monkeypatch.setattr(launch.tempfile, "gettempdir", lambda: str(tmp_path))
    path, target = tmp_path / f"{os.getpid()}.deepspeed", tmp_path / "target"
    if planted == "directory":
        path.mkdir()
        with pytest.raises(LauncherError, match="--save_pid: cannot write .*remove that file"):
            launch._pid_file(True).__enter__()
        return
    if "link" in planted:
        path.symlink_to(target)
    if planted == "link":
        target.write_text("precious")
    if planted == "old file":
        path.write_text("1234567")
    with launch._pid_file(True):
        assert path.read_text() == str(os.getpid()) and not path.is_symlink()
    assert not path.exists()
    assert not target.exists() or target.read_text() == "precious"


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, "4"), (2, 3, "1"), (7, 2, "3")])
def test_threads(cores, ranks, threads):
    assert threads_per_rank({}, cores, ranks) == {"OMP_NUM_THREADS": threads}
    assert threads_per_rank({"OMP_NUM_THREADS": "9"}, cores, ranks) == {}


@pytest.mark.parametrize(
    ("value", "count", "expected"),
    [
        (None, 3, (0, 1, 2)),
        ("", 0, ()),
        ("2,3", 2, (2, 3)),
        (" 5 , 1", 2, (5, 1)),
        ("GPU-1a,MIG-2b", 2, ("GPU-1a", "MIG-2b")),
        ("4,5,99", 2, (4, 5)),  # torch stops at the first device that does not exist
    ],
)
def test_visible_devices(value, count, expected):
    variables = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_ids(variables, ("CUDA_VISIBLE_DEVICES",), count) == expected


def test_the_cpu_is_found_without_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(devices, "_has_device_files", lambda: False)
    assert find_devices({}).is_cpu
    assert find_devices({"DS_ACCELERATOR": "CPU"}).ids == ()


def test_devices_come_from_the_accelerator(monkeypatch):
    class Accelerator:
        def device_name(self):
            return "cuda"

        def visible_devices_envs(self):
            return ["CUDA_VISIBLE_DEVICES"]

        def device_count(self):
            return 2

    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", Accelerator)
    variables = {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert find_devices(variables | {"DS_ACCELERATOR": "cuda"}).ids == (6, 7)
    variables["DS_ACCELERATOR"] = "cuda"
    assert find_devices(variables, ignore_visible=True).ids == (0, 1)
    assert "CUDA_VISIBLE_DEVICES" not in variables

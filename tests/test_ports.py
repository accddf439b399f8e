"""Ports of this machine and who holds them."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import psutil
import pytest

from deepspeed import ports


def test_a_free_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports.free_port()))


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_who_holds_a_port_is_named(family, address):
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {address}")
    with server:
        port = server.getsockname()[1]
        assert not ports.is_free(port)
        if sys.platform.startswith("linux"):
            command = Path("/proc/self/cmdline").read_text().split("\0")[:-1]
            what = f"process {os.getpid()} on host {socket.gethostname()} (`{ports.shortened(command)}`)"
            assert ports.describe_listener(port) == what
    assert ports.is_free(port)
    assert ports.describe_listener(port) == f"another program on host {socket.gethostname()}"


@pytest.mark.parametrize("error", [psutil.AccessDenied(), RuntimeError("malformed line"), OSError("no /proc")])
def test_a_machine_that_does_not_tell_its_connections_does_not_hide_a_message(monkeypatch, error):
    def refuse(kind):
        raise error

    monkeypatch.setattr(psutil, "net_connections", refuse)
    assert ports.describe_listener(ports.free_port()) == f"another program on host {socket.gethostname()}"


def test_long_commands_are_cut():
    assert ports.shortened(["/usr/bin/python", "a b.py"]) == "python 'a b.py'"
    long = ports.shortened(["python", "x" * 200, "--last"])
    assert long.startswith("python xxx") and long.endswith("xxx --last") and "x...x" in long and len(long) <= 100

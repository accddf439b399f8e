"""Which connections are probed."""

import os
import socket
from datetime import timedelta

import pytest
import torch.distributed as torch_dist

from deepspeed.comm.base import probes
from deepspeed.comm.base.probes import probed_connections


def is_probed(one):
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def connected(server):
    client = socket.create_connection(server.getsockname())
    return client, server.accept()[0]


@pytest.fixture
def far(monkeypatch):
    """Connections of this machine count as those to another one."""
    real = probes._stays

    def stays(one):
        real(one)
        return False

    monkeypatch.setattr(probes, "_stays", stays)


def test_what_is_opened_in_the_block_is_probed(far):
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = connected(server)
        with probed_connections():
            inside = connected(server)
        after = connected(server)
        assert [is_probed(one) for one in (*before, *inside, *after)] == [False, False, True, True, False, False]
        assert inside[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        assert inside[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
        for one in (*before, *inside, *after):
            one.close()


def test_what_a_listener_accepts_later_is_probed():
    with probed_connections():
        server = socket.create_server(("127.0.0.1", 0))
    client, accepted = connected(server)
    assert is_probed(accepted) and not is_probed(client)
    for one in (server, client, accepted):
        one.close()


def test_connections_that_stay_on_the_machine_are_left_alone():
    with probed_connections():
        server = socket.create_server(("127.0.0.1", 0))
        pair = connected(server)
        other = socket.socketpair()
    assert not is_probed(pair[0])
    for one in (server, *pair, *other):
        one.close()


def test_an_error_in_the_block_stays(far):
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(KeyError), probed_connections():
            pair = connected(server)
            raise KeyError("x")
        assert is_probed(pair[0])
        for one in pair:
            one.close()


def test_sockets_of_torch_are_found(far):
    before = set(probes._sockets())
    with probed_connections():
        store = torch_dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=20))
        store.set("a", "b")
    probed = []
    for inode, descriptor in probes._sockets().items():
        if inode not in before:
            with socket.socket(fileno=os.dup(descriptor)) as one:
                probed.append(is_probed(one))
    assert probed and any(probed)

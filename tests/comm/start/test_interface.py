"""The interface of gloo where the machine's name means the loopback interface."""

from __future__ import annotations

import socket

import psutil
import pytest
import torch.distributed as torch_dist

from deepspeed.comm.start import interface
from deepspeed.comm.start.environment import Place
from deepspeed.comm.start.interface import choose_interface, interface_of, means_loopback
from deepspeed.comm.start.startup import RankInfo

ELSEWHERE = "192.0.2.7"


def facts(*hosts):
    return [RankInfo(host, 100 + rank, 0, "cpu", 0, "1", "gloo", address) for rank, (host, address) in enumerate(hosts)]


def place(rank):
    return Place(rank, 2, 0, "10.1.1.1", 29500, "test")


@pytest.fixture
def two_interfaces(monkeypatch):
    """A machine with the address 10.1.1.1 at ``eth7``, by which it reaches the others; its name means the loopback."""
    entry = type("Entry", (), {"address": "10.1.1.1"})
    loopback = type("Entry", (), {"address": "127.0.0.1"})
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [loopback], "eth7": [entry]})
    monkeypatch.setattr(interface, "address_towards", lambda host: "10.1.1.1")
    monkeypatch.setattr(interface, "means_loopback", lambda name: True)


def test_both_ends_take_the_interface_of_the_route_to_another_machine(two_interfaces):
    store = torch_dist.HashStore()
    for rank in (0, 1):
        environ = {}
        known = facts(("a", "10.1.1.1"), ("b", ELSEWHERE)) if rank == 0 else []
        choose_interface(environ, store, place(rank), known)
        assert environ == {"GLOO_SOCKET_IFNAME": "eth7"}


def test_nothing_is_set_on_one_machine_or_over_the_users_choice(two_interfaces):
    environ = {}
    choose_interface(environ, torch_dist.HashStore(), place(0), facts(("a", "127.0.0.1"), ("a", "127.0.0.1")))
    assert environ == {}
    environ = {"GLOO_SOCKET_IFNAME": "ib0"}
    choose_interface(environ, torch_dist.HashStore(), place(0), facts(("a", "10.1.1.1"), ("b", ELSEWHERE)))
    assert environ == {"GLOO_SOCKET_IFNAME": "ib0"}


def test_nothing_is_set_where_the_name_means_an_address_of_the_network(two_interfaces, monkeypatch):
    monkeypatch.setattr(interface, "means_loopback", lambda name: False)
    environ = {}
    choose_interface(environ, torch_dist.HashStore(), place(0), facts(("a", "10.1.1.1"), ("b", ELSEWHERE)))
    assert environ == {}


def test_a_machine_without_a_route_is_told_what_to_set(two_interfaces, monkeypatch):
    monkeypatch.setattr(interface, "address_towards", lambda host: None)
    warned = []
    monkeypatch.setattr(interface.logger, "warning", warned.append)
    environ = {}
    choose_interface(environ, torch_dist.HashStore(), place(0), facts(("a", "10.1.1.1"), ("b", ELSEWHERE)))
    assert environ == {} and "Set GLOO_SOCKET_IFNAME" in warned[0]


def test_names_as_gloo_takes_them(monkeypatch):
    def names(*addresses):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    names("127.0.1.1", "10.1.1.1")
    assert means_loopback("a")
    names("10.1.1.1", "127.0.1.1")
    assert not means_loopback("a")
    monkeypatch.undo()
    assert means_loopback("no-such-host.invalid")


def test_the_loopback_is_no_interface_for_others():
    assert interface_of("127.0.0.1") is None and interface_of("203.0.113.9") is None

"""Where the ranks meet, by names that come late, mean several addresses or are unknown."""

import re
import socket
from contextlib import closing
from datetime import timedelta

import pytest

from deepspeed import ports
from deepspeed.comm.base.environment import Place
from deepspeed.comm.start import rendezvous
from deepspeed.comm.start.rendezvous import open_store
from deepspeed.errors import CommunicationError
from deepspeed.exit_notes import NOTES, ExitNotes
from deepspeed.ports import find_listener

NOBODY = "255.255.255.255"  # TCP refuses it at once
LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.2)


class Resolver:
    """Stands for the name server: what it knows, and how many questions it answers by "unknown" before."""

    def __init__(self, known, unknown_for=0):
        self.known, self.unknown_for, self.requested = known, unknown_for, 0
        self._resolve = socket.getaddrinfo

    def __call__(self, name, *arguments, **options):
        if name not in self.known:
            return self._resolve(name, *arguments, **options)
        self.requested += 1
        if self.requested <= self.unknown_for:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [entry for address in self.known[name] for entry in self._resolve(address, *arguments, **options)]


@pytest.fixture
def names(monkeypatch):
    def use(unknown_for=0, **known):
        resolver = Resolver({name.replace("_", "-"): addresses for name, addresses in known.items()}, unknown_for)
        monkeypatch.setattr(socket, "getaddrinfo", resolver)
        return resolver

    monkeypatch.setattr(rendezvous, "_RETRY_SECONDS", 0.001)
    return use


@pytest.fixture
def warnings(monkeypatch):
    texts = []
    monkeypatch.setattr(rendezvous.logger, "warning", texts.append)
    return texts


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "0")  # what open_store sets ends with the test


def place(rank, name, port):
    return Place(rank, 2, 0, name, port, "test")


def listen(address):
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen()
    return listener


def has_ipv6():
    try:
        listen("::1").close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def test_a_name_that_resolves_later_is_waited_for(names, warnings, monkeypatch):
    monkeypatch.setattr(rendezvous, "_IMPATIENT_SECONDS", 0.0)
    resolver = names(unknown_for=7, late_name=["127.0.0.1"])
    with closing(listen("127.0.0.1")) as listener:
        port = listener.getsockname()[1]
        assert rendezvous._wait_for_listener(3, "late-name", port, LONG) == ("127.0.0.1", port)
    assert resolver.requested == 8
    (text,) = warnings  # once, however long it takes
    assert (
        f"rank 3: still waiting for rank 0 at late-name:{port}: host {socket.gethostname()} cannot resolve the name"
        in text
    )


@needs_ipv6
@pytest.mark.parametrize(("listening", "order"), [("127.0.0.1", ["::1", "127.0.0.1"]), ("::1", ["127.0.0.1", "::1"])])
def test_a_name_of_both_families_leads_to_the_address_that_listens(names, listening, order):
    names(both=order)
    with closing(listen(listening)) as listener:
        assert find_listener("both", listener.getsockname()[1]) == listening


def test_rank_0_needs_no_name_and_the_others_reach_it_by_the_address_that_connects(names, warnings):
    """Torch alone would connect by the name: rank 0 as well, and to the first address only."""
    names(unknown_for=10**9, own_name=["127.0.0.1"])
    port = ports.free_port()
    store = open_store(None, place(0, "own-name", port), LONG)
    assert re.search(
        f"rank 0 waits .* at own-name:{port}, but host .* cannot resolve that name .* MASTER_ADDR", warnings[0]
    )
    names(own_name=[NOBODY, "127.0.0.1"])
    other = open_store(None, place(1, "own-name", port), LONG)
    other.set("key", "value")
    assert store.get("key") == b"value" and other.host == "127.0.0.1"
    rendezvous._served.clear()


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ([], "host {host} cannot resolve the name master"),
        (["127.0.0.1"], "nobody listens at master, which is 127.0.0.1 on host {host} (Connection refused)"),
    ],
)
def test_an_address_that_is_never_reached_is_named_with_what_it_resolves_to(names, known, words):
    names(unknown_for=0 if known else 10**9, master=known)
    with pytest.raises(RuntimeError) as error:
        open_store(None, place(1, "master", ports.free_port()), SHORT)
    assert f"rank 0 was not reached within {SHORT}: {words.format(host=socket.gethostname())}" in str(error.value)


def test_a_name_that_means_another_machine_is_doubted_on_rank_0_only_there(names):
    names(elsewhere=["192.0.2.1"], here=["192.0.2.1", "127.0.0.1"])
    assert rendezvous._not_here("here") is None and rendezvous._not_here(socket.gethostname()) is None
    doubt = rendezvous._not_here("elsewhere")
    assert doubt == f"host {socket.gethostname()} takes that name for 192.0.2.1, which it is not"


def test_the_route_to_a_name_is_found_in_both_families(names):
    names(old=["::1", "127.0.0.1"], new=["::1"], unknown=[])
    assert ports.address_towards("old") == "127.0.0.1"
    assert ports.address_towards("no-such-host.invalid") is None
    if has_ipv6():
        assert ports.address_towards("new") == "::1"


@pytest.mark.parametrize(
    ("source", "has_launcher", "words"),
    [
        (
            "test",
            True,
            "It was free when `deepspeed` looked. Start the same command again; .* the same on all machines",
        ),
        ("test", False, r"Set MASTER_PORT to a free port, such as \d+, on all ranks"),
        ("torchrun variables", False, "Start it again: torchrun then chooses another port"),
    ],
)
def test_a_taken_port_that_rank_0_cannot_replace_is_named(tmp_path, monkeypatch, source, has_launcher, words):
    monkeypatch.setattr(rendezvous, "_RELEASE_SECONDS", 0.0)
    if has_launcher:  # of one machine among several
        monkeypatch.setenv(NOTES, str(tmp_path))
    with closing(listen("0.0.0.0")) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(CommunicationError, match=f"127.0.0.1:{port}, .* the port is held by process .*{words}"):
            open_store(None, Place(0, 2, 0, "127.0.0.1", port, source), LONG)


def test_files_lead_from_any_port_to_the_one_that_is_served(tmp_path):
    notes = ExitNotes(tmp_path)
    assert notes.port_of(1) == 1, "no rank can read where rank 0 is"
    notes.starts_whole_run()
    assert notes.port_of(1) is None
    notes.serves(1, 2)
    assert (notes.port_of(1), notes.port_of(2)) == (2, 2)
    notes.serves(2, 1)  # a second group of the same processes
    assert (notes.port_of(1), notes.port_of(2)) == (1, 1)

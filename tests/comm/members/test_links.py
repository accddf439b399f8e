"""Links between processes, and the agreement on the next job; here all members are in one process."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepspeed.comm.members.join import join_run
from deepspeed.comm.members.links import LostMember, MemberLinks, is_stopped
from deepspeed.comm.members.member import JobPlan, RunMember
from deepspeed.comm.members.regroup import Regroup
from deepspeed.elasticity.selection import RunShape
from deepspeed.errors import CommunicationError

TOKEN = "secret"


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Runs calls in threads of their own; returns what they return, or what they raise."""
    results: list[Any] = [None] * len(calls)

    def work(place: int, call: Callable[[], Any]) -> None:
        try:
            results[place] = call()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture
def linked() -> Iterator[list[MemberLinks]]:
    """Three members, linked."""
    links = [MemberLinks("127.0.0.1", TOKEN) for _ in range(3)]
    members = [
        RunMember(number, number, "here", 100 + number, number, each.address) for number, each in enumerate(links)
    ]
    for number, each in enumerate(links):
        each.settle(members, number)
    assert at_once(*[lambda each=each: each.connect(60) for each in links]) == [None] * 3
    yield links
    for each in links:
        each.close()


def kill(links: MemberLinks) -> None:
    """What the kernel does with the sockets of a process that ends."""
    for link in list(links._links.values()):
        link.peer.shutdown(socket.SHUT_RDWR)


def regroup(
    links: MemberLinks,
    held: list[Any],
    patience: float = 60.0,
    shape: RunShape | None = None,
    epoch: int = 0,
    served: frozenset[int] = frozenset(),
) -> JobPlan | None:
    choose = (shape or RunShape()).choose
    return Regroup(links, epoch, held, choose, lambda host: 7, patience, served).run()


def held(owner: int, *generations: int, owners: tuple[int, ...] = (0, 1, 2), is_whole: bool = False) -> list[Any]:
    part, count = (0, 1) if is_whole else (owner, len(owners))
    return [[[generation, 0], part, count] for generation in generations]


def ready(epoch: int, held: list[Any], lost: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"kind": "ready", "epoch": epoch, "held": held, "join_requests": [], "lost": list(lost)}


def test_a_ready_message_of_the_last_agreement_is_ignored(linked):
    """Its sender has taken the plan since, and holds other copies."""
    for number, each in enumerate(linked):
        each.settle(each.members, number, epoch=1)
    kill(linked[2])
    assert linked[0].wait_for_loss(60) and linked[1].wait_for_loss(60)
    linked[1].send(0, ready(0, held(1, 2)))
    with pytest.raises(CommunicationError, match="still missing: rank 1"):
        regroup(linked[0], held(0, 3, is_whole=True), patience=1.0, epoch=1)


def test_a_ready_message_of_a_member_that_could_not_take_the_last_plan_counts(linked):
    """It had lost a member of that plan already."""
    linked[0].settle(linked[0].members, 0, epoch=1)
    kill(linked[2])
    assert linked[0].wait_for_loss(60) and linked[1].wait_for_loss(60)
    linked[1].send(0, ready(0, held(1, 3, is_whole=True), lost=(2,)))
    plan = regroup(linked[0], held(0, 3, is_whole=True), epoch=1)
    assert [member.number for member in plan.members] == [0, 1]
    assert plan.source == (3, 0)


def test_the_end_of_a_process_is_seen_at_once(linked):
    seen: list[LostMember] = []
    linked[0].on_loss = seen.append
    kill(linked[2])
    assert linked[0].wait_for_loss(60)
    assert linked[1].wait_for_loss(60)
    assert [lost.member.number for lost in seen] == [2]
    assert seen[0].is_certain
    assert [member.number for member in linked[0].living] == [0, 1]


def test_a_forked_child_does_not_hide_the_end_of_its_parent(linked):
    """As workers of a data loader do, it outlives the parent for a while."""
    pid = os.fork()
    if pid == 0:
        try:
            time.sleep(300)
        finally:
            os._exit(0)
    try:
        for link in list(linked[2]._links.values()):
            link.peer.close()
        assert linked[0].wait_for_loss(60)
        assert linked[1].wait_for_loss(60)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_who_is_dropped_by_the_others_does_not_continue_alone(linked):
    """The network between 0 and 2 breaks; 1 hears of it from 0 and leaves 2 out, which could go on with its copies."""
    linked[1].drop(2)
    linked[0].drop(2)
    assert linked[2].wait_for_loss(60)
    with pytest.raises(CommunicationError, match="so the run continues without it"):
        regroup(linked[2], held(2, 3, is_whole=True))
    plans = at_once(*[lambda n=n: regroup(linked[n], held(n, 3, is_whole=True)) for n in (0, 1)])
    assert [member.number for member in plans[0].members] == [0, 1]


def test_who_sends_no_sign_of_life_is_lost(linked):
    """Its thread does not go on, as that of a process that hangs; the sockets stay open."""
    is_free = threading.Event()
    linked[2]._accept = is_free.wait  # type: ignore[method-assign]
    for each in linked:
        each.expect_beats(2.0)
    deadline = time.monotonic() + 60
    while None in (linked[0]._links[2].last_sign, linked[1]._links[2].last_sign) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not linked[0].lost
    with socket.create_connection(linked[2].address, timeout=5):
        assert linked[0].wait_for_loss(20) and linked[1].wait_for_loss(20)
    is_free.set()
    lost = linked[0].lost
    assert not lost[2].is_certain
    assert lost[2].cause == "it has sent no heartbeat for 2 s (elasticity.heartbeat)"
    deadline = time.monotonic() + 60
    while not linked[2].is_dropped and time.monotonic() < deadline:
        time.sleep(0.01)
    assert linked[2].is_dropped


def test_a_process_that_a_signal_has_stopped():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)


def test_a_farewell_is_no_loss(linked):
    linked[2].close()
    deadline = time.monotonic() + 60
    while linked[0].departed != {2} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert linked[0].departed == {2}
    assert not linked[0].wait_for_loss(0.2)


@pytest.mark.parametrize(
    "words",
    [
        b'{"kind": "hello", "token": "guess", "number": 1}\n', b"GET / HTTP/1.1\n\n", b"[1]\n",
        b'{"kind": "hello", "token": "\\u00e9", "number": 1}\n', b"[" * 60_000 + b"\n",
    ],
)  # fmt: skip
def test_strangers_are_not_let_in(linked, words):
    with socket.create_connection(linked[0].address, timeout=60) as stranger:
        stranger.sendall(words)
        assert stranger.recv(10) == b""
    assert not linked[0].lost


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_who_is_left_agrees_on_the_newest_copies_that_are_whole(linked, dead):
    """Every rank has its own copies of two generations and its neighbor's; of the newest, one is missing."""
    of = {
        0: held(0, 4, 5) + held(2, 4, 5),
        1: held(1, 4, 5) + held(0, 4, 5),
        2: held(2, 4) + held(1, 4),
    }
    kill(linked[dead])
    left = [number for number in range(3) if number != dead]
    plans = at_once(*[lambda n=n: regroup(linked[n], of[n]) for n in left])
    assert plans[0] == plans[1]
    plan = plans[0]
    assert [member.number for member in plan.members] == left
    assert [member.rank for member in plan.members] == [0, 1]
    assert dead not in [member.number for member in plan.everybody]
    assert plan.epoch == 1
    assert plan.source == ((5, 0) if dead == 2 else (4, 0))


def test_a_leader_that_dies_is_no_special_case(linked):
    """Rank 2 is lost; rank 0, which would lead, is silent and then lost too."""
    kill(linked[2])
    assert linked[1].wait_for_loss(60)

    def late() -> None:
        time.sleep(0.3)
        kill(linked[0])

    plan, _ = at_once(lambda: regroup(linked[1], held(1, 3, is_whole=True)), late)
    assert [member.number for member in plan.members] == [1]
    assert not {0, 2} & {member.number for member in plan.everybody}


def test_who_does_not_come_is_named(linked):
    with pytest.raises(CommunicationError, match=r"still missing: rank 1 \(host here, pid 101\), rank 2"):
        regroup(linked[0], held(0, 1), patience=0.3)


def test_a_machine_that_is_silent_needs_a_majority(linked):
    """Half of the members cannot know whether the other half continues."""
    with linked[0]._changed:
        for number in (1, 2):
            linked[0]._lost[number] = LostMember(linked[0]._members[number], time.monotonic(), is_certain=False)
    kill(linked[0])
    deadline = time.monotonic() + 60
    while len(linked[0].living) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    with linked[0]._changed:
        for number in (1, 2):
            linked[0]._lost[number] = LostMember(linked[0]._members[number], time.monotonic(), is_certain=False)
    with pytest.raises(CommunicationError, match="are no majority of 3"):
        regroup(linked[0], held(0, 1))


def test_a_process_that_knocks_is_in_the_plan(linked):
    with ask_to_join(linked[1]) as door:
        wait_until(lambda: linked[1].joining == 1)
        plans = at_once(*[lambda n=n: regroup(linked[n], held(n, 3)) for n in range(3)])
        answer = json.loads(door.makefile().readline())
    assert plans[0] == plans[1] == plans[2] == JobPlan.from_json(answer["plan"])
    assert [member.pid for member in plans[0].members] == [100, 101, 102, 7]
    assert plans[0].newcomers == (answer["number"],)


def ask_to_join(links: MemberLinks, port: int = 1) -> socket.socket:
    """Asks a member to let a process in, and returns the connection once the member knows."""
    door = socket.create_connection(links.address, timeout=60)
    new = RunMember(-1, -1, "there", 7, 0, ("127.0.0.1", port))
    door.sendall(json.dumps({"kind": "join_request", "token": TOKEN, "member": new.to_json()}).encode() + b"\n")
    return door


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert holds()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\n", b"[1]\n", b"\xff\n", b""])
def test_a_process_that_wants_to_join_what_is_no_run(answer):
    threads = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(answer)

        served = threading.Thread(target=serve)
        served.start()
        with pytest.raises(CommunicationError, match="could not join"):
            join_run(f"127.0.0.1:{server.getsockname()[1]}/{TOKEN}")
        served.join(60)
    assert threading.active_count() == threads  # nothing is left that watches links


def test_a_port_that_cannot_be():
    with pytest.raises(CommunicationError, match="expected host:port/token"):
        join_run(f"127.0.0.1:99999/{TOKEN}")


def test_a_spare_waits_until_it_is_needed(linked):
    """Of two parts of the model, part 0 is held by members 0 and 2, part 1 by member 1: one of the former is a spare.

    A process that asks the spare makes a job of four with it; then those with ranks come to their end.
    """
    members = [
        RunMember(number, number, "here", 100 + number, number, each.address, part=number % 2)
        for number, each in enumerate(linked)
    ]
    for number, each in enumerate(linked):
        each.settle(members, number)
    shape = RunShape(parts=2)
    copies = {0: held(0, 3), 1: held(1, 3) + held(2, 3), 2: held(2, 3) + held(0, 3)}
    plans = at_once(*[lambda n=n: regroup(linked[n], copies[n], shape=shape) for n in range(3)])
    assert plans[0] == plans[1] == plans[2]
    plan = plans[0]
    assert [(member.number, member.rank, member.part) for member in plan.members] == [(0, 0, 0), (1, 1, 1)]
    assert [(member.number, member.rank, member.part) for member in plan.spares] == [(2, -1, 0)]
    assert plan.source == (3, 0)

    def stand_by(epoch: int) -> JobPlan | None:
        return regroup(linked[2], copies[2], shape=shape, epoch=epoch, served=frozenset({0, 1}))

    def grow(number: int) -> JobPlan | None:
        if number == 0:
            door = ask_to_join(linked[2])
            wait_until(lambda: linked[0].joining == 1)
            answer.append(door)
        return regroup(linked[number], copies[number], shape=shape, epoch=1)

    answer: list[socket.socket] = []
    grown = at_once(lambda: grow(0), lambda: grow(1), lambda: stand_by(1))
    assert grown[0] == grown[1] == grown[2]
    assert [(member.number, member.part) for member in grown[0].members][:3] == [(0, 0), (1, 1), (2, 0)]
    assert grown[0].members[3].part == 1 and not grown[0].spares
    assert json.loads(answer[0].makefile().readline())["plan"] == grown[0].to_json()
    answer[0].close()

    def leave() -> None:
        for number in (0, 1):
            linked[number].close()

    ended = at_once(lambda: stand_by(3), leave)
    assert ended[0] is None

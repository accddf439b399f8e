"""A network in a program: moves IP packets between the TUN devices of several network namespaces.

Run by :class:`tests.harness.machines.Machines` inside a network namespace of its own, so that no packet leaves this
machine. Every link has a bandwidth, a delay, and a switch that cuts it without a word to either end, as a machine does
that loses its power. Commands come by standard input, one a line: ``cut NAME``, ``restore NAME``, ``bytes``.

A kernel's own delays (netem) and packet filters need modules that small machines do not have; TUN devices suffice here.
"""

import fcntl
import heapq
import ipaddress
import json
import os
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LARGEST_PACKET = 65536
# A link keeps so many bytes that wait; what comes then is dropped, and TCP slows down.
_LONGEST_QUEUE = 4 << 20


@dataclass
class _Link:
    """One machine's link.

    Attributes:
        name: Of the machine.
        descriptor: Of its TUN device.
        free_at: When the link has transmitted everything sent so far.
        sent: Bytes that it has sent to the others.
        is_cut: Whether nothing passes.
    """

    name: str
    descriptor: int
    free_at: float = 0.0
    sent: int = 0
    is_cut: bool = False


def open_device(name: str, process: int) -> int:
    """Creates a TUN device and moves it into the network namespace of ``process``; returns its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "netns", str(process)], check=True)
    return descriptor


def target_of(packet: bytes) -> bytes:
    """Returns the destination address of an IP packet; empty if it is not an IP packet."""
    version = packet[0] >> 4 if packet else 0
    return {4: packet[16:20], 6: packet[24:40]}.get(version, b"")


class _Network:
    def __init__(self, links: dict[str, tuple[_Link, list[bytes]]], megabits: float, delay: float) -> None:
        self._links = [link for link, _ in links.values()]
        self._by_address = {address: link for link, addresses in links.values() for address in addresses}
        self._seconds_per_byte = 8e-6 / megabits if megabits else 0.0
        self._delay = delay
        self._waiting: list[tuple[float, int, bytes, _Link, _Link]] = []
        self._count = 0

    def run(self) -> None:
        """Moves packets until standard input ends."""
        watched = {link.descriptor: link for link in self._links}
        while True:
            wait = max(self._waiting[0][0] - time.monotonic(), 0.0) if self._waiting else None
            for descriptor in select.select([sys.stdin, *watched], [], [], wait)[0]:
                if descriptor is sys.stdin:
                    line = sys.stdin.readline()
                    if not line:
                        return
                    self._obey(line.split())
                else:
                    self._take(watched[descriptor])
            self._deliver()

    def _obey(self, words: list[str]) -> None:
        for link in self._links:
            if words[0] in ("cut", "restore") and link.name == words[1]:
                link.is_cut = words[0] == "cut"
        print(json.dumps({link.name: link.sent for link in self._links}), flush=True)

    def _take(self, source: _Link) -> None:
        for _ in range(64):
            try:
                packet = os.read(source.descriptor, _LARGEST_PACKET)
            except BlockingIOError:
                return
            except OSError:  # the machine has gone, and its device with it
                source.is_cut = True
                return
            now = time.monotonic()
            target = self._by_address.get(target_of(packet))
            too_late = (source.free_at - now) > _LONGEST_QUEUE * self._seconds_per_byte and self._seconds_per_byte
            if target is None or source.is_cut or too_late:
                continue
            source.sent += len(packet)
            source.free_at = max(now, source.free_at) + len(packet) * self._seconds_per_byte
            self._count += 1
            heapq.heappush(self._waiting, (source.free_at + self._delay, self._count, packet, source, target))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, packet, source, target = heapq.heappop(self._waiting)
            if source.is_cut or target.is_cut:
                continue
            try:
                os.write(target.descriptor, packet)
            except OSError:  # as _take; or its buffer is full, where a network loses packets too
                continue


def main() -> None:
    """Takes ``{"megabits": M, "delay": S, "machines": {name: [process, [address, ...]]}}`` on its command line."""
    settings = json.loads(sys.argv[1])
    links = {}
    for number, (name, (process, addresses)) in enumerate(settings["machines"].items()):
        link = _Link(name, open_device(f"wire{number}", process))
        links[name] = (link, [ipaddress.ip_address(address).packed for address in addresses])
    print("ready", flush=True)
    _Network(links, settings["megabits"], settings["delay"]).run()


if __name__ == "__main__":
    main()

"""Description of a cluster on one machine, and the commands that build it.

                     core                    2 supernodes of 2 hosts: Lab(supernodes=2, hosts=2, ...)
             ┌────────┴────────┐             up-link: hosts × rate / oversubscribe, each way
          switch0           switch1
          ┌──┴──┐           ┌──┴──┐          link: rate, each way
         h0     h1         h2     h3         10.99.1.1  10.99.1.2  10.99.2.1  10.99.2.2

A host has namespaces of its own for the network (its eth0), its name and System V memory, and its own /dev/shm. A link
is a veth pair; each end may send no faster than the link's rate. The machine that starts the ranks, labhead, is on the
topmost switch itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from unisono.errors import LabError
from unisono.formats import parse_quantity

Command = tuple[str, ...]

HOME = "/dev/shm/lab"
"""Folder of the lab's files: on a /dev/shm of its own, which the machine does not see."""

OTHER_TMP = f"{HOME}/tmp"
"""Replacement of /tmp that links to the machine's files; files created in it vanish with the lab."""

MACHINE_TMP = f"{OTHER_TMP}/.the-machine-has"
"""The machine's /tmp, the target of those links."""

NAMESPACE_KINDS = ("net", "uts", "ipc")
"""Lasting namespaces of a host: network, name, System V memory. Each has a file in the host's folder."""

HEAD = "labhead"
HEAD_ADDRESS = "10.99.0.1"

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}

MAX_RANKS = 4096
"""Largest number of ranks, each a process of this machine."""

SLOWEST, FASTEST = 10**5, 10**11
"""Range of the links that can be requested, in bits per second."""

MTU = 1500
LARGEST_TRAIN = 65_536
"""Bytes of the largest train, which TCP hands to an interface at once: many packets' worth, cut on the way."""

BUCKET_SECONDS = 0.0005
"""Burst of an idle link, in seconds of its rate: enough for the kernel's timer to come late."""

WINDOW_SECONDS = 0.01
"""Bytes that a connection may have in flight, in seconds of a link's rate: many round trips of an idle network."""

SMALLEST_WINDOW = 65_536
LARGEST_QUEUE = 2**31


class Link(NamedTuple):
    """Limits of one end of a link. The queue has room for a full window of every connection, so no packet is lost."""

    rate: int
    """Bits per second, headers of Ethernet, IP and TCP included."""

    train: int
    """Most bytes that TCP hands over at once."""

    queue: int
    """Most bytes that may wait."""

    @property
    def bucket(self) -> int:
        """Bytes that an idle link may send at once: a train at least, with headers for each of its packets."""
        return max(self.train + self.train // 16 + MTU, int(self.rate * BUCKET_SECONDS / 8))

    def shape(self, interface: str) -> Command:
        """Return the command that limits an interface to the link's rate."""
        limit = self.bucket + self.queue
        shaping = ("tbf", "rate", f"{self.rate}bit", "burst", f"{self.bucket}b", "limit", f"{limit}b")
        return ("tc", "qdisc", "add", "dev", interface, "root", *shaping)


class Host(NamedTuple):
    """Host of the lab."""

    number: int
    supernode: int
    within: int
    """Number of the host within its supernode."""

    @property
    def name(self) -> str:
        """Name of the host, for itself and for the others."""
        return f"h{self.number}"

    @property
    def address(self) -> str:
        """Address of the host, unique in the lab."""
        return f"10.99.{self.supernode + 1}.{self.within + 1}"

    def inside(self, *command: str, program: str = "nsenter") -> Command:
        """Return the command that runs `command` on this host: `unshare` creates its namespaces for that."""
        return (program, *(f"--{kind}={HOME}/{self.name}/{kind}" for kind in NAMESPACE_KINDS), "--", *command)


@dataclass(frozen=True)
class Lab:
    """Cluster of `supernodes` switches with `hosts` hosts each.

    A link between a host and its switch carries `rate` bits per second each way; that of a host in `slow_hosts`, as
    (number, factor), carries the factor's share of it. A switch's uplink carries the sum of its hosts' rates without
    slow ones, divided by `oversubscribe`. `ranks_per_host` ranks run on each host. Raises LabError for values out of
    range.
    """

    supernodes: int
    hosts: int
    rate: int
    oversubscribe: float = 1.0
    ranks_per_host: int = 1
    slow_hosts: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for option, count in (("supernodes", self.supernodes), ("hosts", self.hosts)):
            if not 1 <= count <= 254:
                raise LabError(f"--{option} {count}: a lab has 1 to 254, since each is a byte of an address")
        if self.ranks_per_host < 1:
            raise LabError(f"--ranks-per-host {self.ranks_per_host}: a host runs at least 1 rank")
        if (ranks := self.supernodes * self.hosts * self.ranks_per_host) > MAX_RANKS:
            raise LabError(f"{ranks:,} ranks are too many for a lab on one machine; the limit is {MAX_RANKS:,}")
        if not 0.01 <= self.oversubscribe <= 1000:
            raise LabError(f"--oversubscribe {self.oversubscribe:g}: give 0.01 to 1000; 1 is not over-subscribed")
        if not SLOWEST <= self.rate <= FASTEST:
            raise LabError(f"--rate of {self.rate} bits per second: a lab's links can have 100kbit to 100gbit")
        if self.supernodes > 1 and self.uplink_rate < SLOWEST:
            raise LabError(f"uplinks of {self.uplink_rate} bits per second: raise --rate or lower --oversubscribe")
        for host, factor in self.slow_hosts:
            if not 0 <= host < self.supernodes * self.hosts:
                last = self.supernodes * self.hosts - 1
                raise LabError(f"--slow-host {host}:{factor:g}: there is no host {host}; hosts are 0 to {last}")
            if not 1 <= factor <= self.rate / SLOWEST:
                raise LabError(f"--slow-host {host}:{factor:g}: the factor is 1 to {self.rate / SLOWEST:g}")

    @property
    def uplink_rate(self) -> int:
        """Rate between a switch and the core, each way, in bits per second."""
        return int(self.hosts * self.rate / self.oversubscribe)

    @property
    def window(self) -> int:
        """Bytes that a connection may have in flight."""
        return max(int(self.rate * WINDOW_SECONDS / 8), SMALLEST_WINDOW)

    def link(self, host: int) -> Link:
        """Return the link between a host and its switch."""
        here, elsewhere = self.ranks_per_host, self.ranks_per_host * (self.supernodes * self.hosts - 1)
        rate = int(self.rate / dict(self.slow_hosts).get(host, 1.0))
        return Link(rate, _train(rate), self._queue(here * elsewhere))

    @property
    def uplink(self) -> Link:
        """Link between a switch and the core."""
        here = self.ranks_per_host * self.hosts
        return Link(self.uplink_rate, _train(self.rate), self._queue(here * here * (self.supernodes - 1)))

    def _queue(self, pairs: int) -> int:
        """Return the bytes of a queue with room for two connections of each pair of ranks."""
        return min(2 * max(pairs, 1) * self.window, LARGEST_QUEUE)

    @property
    def members(self) -> tuple[Host, ...]:
        """Hosts of the lab, supernode by supernode."""
        return tuple(Host(number, *divmod(number, self.hosts)) for number in range(self.supernodes * self.hosts))


def parse_rate(text: str) -> int:
    """Return a rate, as `tc` writes it, in bits per second; kbit, mbit and gbit are powers of 1000.

    >>> parse_rate("1.5gbit")
    1500000000

    Raises LabError for any other form, and for nothing.
    """
    rate = round(parse_quantity(text, UNITS) or 0)
    if not rate:
        raise LabError(f"--rate {text}: write a rate like 200mbit, in kbit, mbit or gbit per second, above 0")
    return rate


def parse_slow_host(text: str) -> tuple[int, float]:
    """Return the number of a host, and the factor by which its link is slower.

    >>> parse_slow_host("3:4")
    (3, 4.0)

    Raises LabError for any other form.
    """
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)", text)
    if match is None:
        raise LabError(f"--slow-host {text}: write the host's number and a factor, such as 3:4")
    return int(match[1]), float(match[2])


def _train(rate: int) -> int:
    """Return the most bytes that TCP hands over at once on a link of this rate."""
    return min(max(int(rate * BUCKET_SECONDS / 8), 2 * MTU), LARGEST_TRAIN)


def hosts_file(lab: Lab, present: str) -> str:
    """Return /etc/hosts of the lab: its `present` content, and the names of the lab."""
    names = [(HEAD_ADDRESS, HEAD), *((host.address, host.name) for host in lab.members)]
    return "\n".join([present.rstrip("\n"), *(f"{address} {name}" for address, name in names), ""])


def commands(lab: Lab) -> Iterator[Command]:
    """Yield the commands that build the cluster, in order; run as root in fresh namespaces, with `HOME` filled."""
    yield ("hostname", HEAD)
    yield ("mount", "--bind", f"{HOME}/hosts", "/etc/hosts")
    yield ("mount", "--bind", "/tmp", MACHINE_TMP)
    yield ("ip", "link", "set", "lo", "up")
    for supernode in range(lab.supernodes):
        yield from _switch(f"switch{supernode}")
    top = "switch0"
    if lab.supernodes > 1:
        top = "core"
        yield from _switch(top)
        for supernode in range(lab.supernodes):
            up, down = f"up{supernode}", f"down{supernode}"
            yield ("ip", "link", "add", up, "type", "veth", "peer", "name", down)
            yield from _port(up, f"switch{supernode}", lab.uplink)
            yield from _port(down, top, lab.uplink)
    yield ("ip", "address", "add", f"{HEAD_ADDRESS}/16", "dev", top)
    for host in lab.members:
        yield from _host(lab, host)


def _switch(name: str) -> Iterator[Command]:
    yield ("ip", "link", "add", name, "type", "bridge")
    yield ("ip", "link", "set", name, "addrgenmode", "none", "up")


def _port(interface: str, switch: str, link: Link) -> Iterator[Command]:
    yield ("ip", "link", "set", interface, "master", switch)
    yield from _end(interface, link)


def _end(interface: str, link: Link) -> Iterator[Command]:
    """Yield the commands for one end of a link: shape it, then set it up."""
    yield link.shape(interface)
    yield ("ip", "link", "set", interface, "addrgenmode", "none", "gso_max_size", str(link.train), "up")


def _host(lab: Lab, host: Host) -> Iterator[Command]:
    """Yield the commands for a host's namespaces and its link."""
    port = f"port{host.number}"
    yield host.inside("hostname", host.name, program="unshare")
    yield ("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", f"{HOME}/{host.name}/net")
    yield from _port(port, f"switch{host.supernode}", lab.link(host.number))
    yield ("mount", "-t", "tmpfs", "-o", "mode=1777", "lab", f"{HOME}/{host.name}/shm")
    yield host.inside("ip", "link", "set", "lo", "up")
    yield host.inside("ip", "address", "add", f"{host.address}/16", "dev", "eth0")
    yield from (host.inside(*command) for command in _end("eth0", lab.link(host.number)))
    for name, value in (("congestion_control", "reno"), ("rmem", f"4096 {lab.window} {lab.window}")):
        yield host.inside("sh", "-c", f"echo {value} > /proc/sys/net/ipv4/tcp_{name}")

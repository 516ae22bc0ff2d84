"""Network address of this machine, for libraries that must be given it."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface."""


def address_towards(host: str) -> str:
    """Return this machine's address on the route to a host, or that of its name without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, 9))
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        address: str = asking.getsockname()[0]
    return address


def interface_of(address: str) -> str:
    """Return the network interface that has an address; "lo" where none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with suppress(OSError):  # it has no address
                if socket.inet_ntoa(fcntl.ioctl(asking, SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return "lo"

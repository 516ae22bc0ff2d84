"""Where this machine is found on the network, for libraries that must be told."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

SIOCGIFADDR = 0x8915
"""Linux: asks for the address of an interface."""


def address_towards(host: str) -> str:
    """This machine's address on the way to a host, or that of its name where no way leads there. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, 9))
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        address: str = asking.getsockname()[0]
    return address


def interface_of(address: str) -> str:
    """The network interface that has an address; "lo" where none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with suppress(OSError):  # it has no address
                if socket.inet_ntoa(fcntl.ioctl(asking, SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return "lo"

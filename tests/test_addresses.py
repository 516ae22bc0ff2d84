"""Addresses and interfaces of this machine."""

import socket

from unisono.addresses import address_towards, interface_of


def test_address_towards_this_machine_is_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") in {name for _, name in socket.if_nameindex()}


def test_unknown_address_is_loopback() -> None:
    assert interface_of("192.0.2.1") == "lo"

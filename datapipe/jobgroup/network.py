"""This node's network interfaces, and whether it reaches another node by them, before anything depends on it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import SettingError

Gather = Callable[[str, Any], list[Any]]  # as Crew.gather

_SIOCGIFADDR = 0x8915  # netdevice(7): the first IPv4 address of an interface
_LINK_LOCAL = 0x20  # the scope, in /proc/net/if_inet6
_CALL_S = 10.0  # how long another node may take to answer, unless less is asked for
TOKEN_BYTES = 16
_ANY_HOST = "192.0.2.1"  # of no network (RFC 5737): what leads there is the default route


def interface_addresses() -> dict[str, str]:
    """Return this host's interfaces that have an address, by name: the IPv4 address, or else the IPv6 one."""
    addresses = {}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)))
            addresses[name] = socket.inet_ntoa(answer[20:24])  # a sockaddr_in behind the 16 bytes of the name
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) != _LINK_LOCAL:
                addresses.setdefault(name, str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return addresses


def address_of(interface: str) -> str:
    """Return an interface's address. Raises SettingError where this host has no such interface, or it no address."""
    addresses = interface_addresses()
    if interface not in addresses:
        is_here = interface in (name for _, name in socket.if_nameindex())
        problem = "has no address" if is_here else "is not on this host"
        others = ", ".join(f"{name} ({address})" for name, address in addresses.items())
        raise SettingError(f"interface: {interface!r} {problem}; allowed: {others}")
    return addresses[interface]


def address_towards(host: str) -> str:
    """Return this host's address on the network that leads to another; nothing is sent."""
    (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def link_speed(host: str = "") -> tuple[str, float | None]:
    """Find the interface that leads to a host.

    Args:
        host: Name of the host; "": the interface of the default route.

    Returns:
        The interface's name, "" where none leads there; what its link carries in MB/s (10⁶ bytes), None where the
        kernel does not know, as for virtual ones.
    """
    with suppress(OSError):
        address = address_towards(host or _ANY_HOST)
        names = [name for name, its_address in interface_addresses().items() if its_address == address]
        for name in names:
            with suppress(ValueError, OSError):
                megabits = int(Path("/sys/class/net", name, "speed").read_text())
                return name, megabits / 8 if megabits > 0 else None
            return name, None
    return "", None


def find_address(gather: Gather, index: int, interface: str | None, master: str) -> str:
    """Find, together with all other nodes, this node's address for what it exchanges with them.

    Args:
        gather: Function that tells all nodes something, and returns what each tells; see `Crew.gather`.
        index: Number of this node.
        interface: Network interface; None: the one that leads to process 0, or from there to node 1.
        master: Host of process 0.

    Returns:
        The address; "" where there is none.
    """
    mine = ""
    with suppress(OSError, SettingError):
        if interface:
            mine = address_of(interface)
        elif index:
            mine = address_towards(master)
    addresses = gather("address", mine)
    with suppress(OSError):
        if index == 0 and not interface:
            mine = address_towards(addresses[1])
    return mine


def find_unreachable(gather: Gather, index: int, hosts: list[str], mine: str, timeout_s: float) -> str:
    """Find out, together with all other nodes, whether each reaches the next one, and the last the first.

    Args:
        gather: Function that tells all nodes something, and returns what each tells; see `Crew.gather`.
        index: Number of this node.
        hosts: Names of all nodes.
        mine: Address of this node; "" if it has none.
        timeout_s: Longest time that a node may take to answer, in seconds.

    Returns:
        Description of which node does not reach which, with the addresses of both, the same on all nodes; "" if all do.
    """
    token = os.urandom(TOKEN_BYTES)
    with ExitStack() as stack:
        port, problem = 0, "it has no address on this network"
        if mine:
            try:
                port, problem = stack.enter_context(_answering(mine, token)), ""
            except OSError as error:
                problem = error.strerror or str(error)
        places = gather("place", [mine, port, token.hex()])
        host, its_port, its_token = places[(index + 1) % len(hosts)]
        if not problem:
            problem = _call(mine, (host, its_port), bytes.fromhex(its_token), timeout_s)
        problems = gather("reach", problem)
    names = [f"node {node} ({name}, {places[node][0] or 'no address'})" for node, name in enumerate(hosts)]
    failures = [
        f"{names[node]} does not reach {names[(node + 1) % len(hosts)]}: {problem}"
        for node, problem in enumerate(problems)
        if problem
    ]
    return f"{failures[0]} ({len(failures)} of {len(hosts)} pairs fail)" if failures else ""


@contextmanager
def _answering(address: str, token: bytes) -> Iterator[int]:
    """Answer with a token at an address of this host; yield the port. Raises OSError where that cannot be."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=128) as server:

        def answer() -> None:
            with suppress(OSError):  # until it is shut down
                while True:
                    caller, _ = server.accept()
                    with caller, suppress(OSError):
                        caller.sendall(token)

        threading.Thread(target=answer, name="datapipe-answer", daemon=True).start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread


def _call(source: str, place: tuple[str, int], token: bytes, limit_s: float) -> str:
    """Return why no host that answers with a token is reached from an address of this one; "" if it is."""
    try:
        with socket.create_connection(place, min(limit_s, _CALL_S), (source, 0)) as caller:
            answer = caller.recv(len(token), socket.MSG_WAITALL)
    except OSError as error:
        return error.strerror or str(error)
    return "" if answer == token else "somebody else answers there"

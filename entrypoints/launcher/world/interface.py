"""Find the network interface towards the other nodes, for Gloo and NCCL.

Gloo left alone listens on the address that the machine's own name stands for, which on Debian is 127.0.1.1.
"""

from __future__ import annotations

import ipaddress
import socket

SIOCGIFADDR = 0x8915


def towards(host: str) -> str:
    """Return the name of the interface whose address this node uses towards a host; "" where it is not known."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: the kernel only chooses a way
            own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
        return next((name for name, address in _addresses() if address == own), "")
    except (OSError, ValueError):
        return ""


def _addresses() -> list[tuple[str, object]]:
    """Return name and address of every interface (Linux): the first of version 4, all of version 6."""
    import fcntl

    addresses: list[tuple[str, object]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
            except OSError:
                continue  # it has none
            addresses.append((name, ipaddress.ip_address(answer[20:24])))
    try:
        with open("/proc/net/if_inet6") as file:
            for line in file:
                digits, *_, name = line.split()
                addresses.append((name, ipaddress.ip_address(bytes.fromhex(digits))))
    except OSError:
        pass  # this machine has no IPv6
    return addresses

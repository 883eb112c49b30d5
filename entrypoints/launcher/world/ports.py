"""Reserve a free port (MASTER_PORT) for the ranks' rendezvous until rank 0 listens on it."""

from __future__ import annotations

import _socket as socket  # of which `socket` makes enums, which costs every job some milliseconds

from . import frameworks

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from ..manifest import Manifest


def hold() -> socket.socket:
    """Return a bound socket that does not listen; its port is MASTER_PORT as long as the socket is kept.

    The kernel gives a bound port to no process that asks for any free one, neither by bind nor by connect. Rank 0 may
    still bind and listen there: both sockets set SO_REUSEADDR (torch's TCPStore does), and ours never listens.
    """
    try:
        held = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        try:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # both families, as TCPStore binds
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("::", 0))
            return held
        except OSError:
            held.close()
    except OSError:
        pass  # this machine has no IPv6
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def hold_all(manifest: Manifest) -> list[socket.socket]:
    """Return held ports on which ranks of this node listen: of a service's first node its MASTER_PORT."""
    if manifest.is_service:
        return [hold()] if manifest.role_rank == 0 else []
    return [hold() for _ in range(frameworks.ports_needed(manifest))]


def numbers(held: list[socket.socket]) -> list[int]:
    """Return the ports' numbers."""
    return [each.getsockname()[1] for each in held]

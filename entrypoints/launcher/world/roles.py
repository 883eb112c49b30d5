"""Roles of an attempt: which of them start when, and how their nodes find those of the others; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from ..manifest import Role


class RoleStarts:
    """The order in which roles start: each after the services that it names in `after` are ready on all of their nodes."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self._roles = {role["name"]: role for role in roles}
        self._nodes: dict[str, list[int]] = {}
        first = 0
        for role in roles:
            self._nodes[role["name"]] = list(range(first, first + role["nodes"]))
            first += role["nodes"]
        self._started: set[str] = set()
        self._up: set[int] = set()

    def up(self, node: int) -> str:
        """Record that a node's service is ready; return the role's name when all of its nodes are, else ""."""
        self._up.add(node)
        name = next(name for name, nodes in self._nodes.items() if node in nodes)
        return name if self._is_ready(name) else ""

    def due(self) -> list[list[int]]:
        """Return the nodes of each role that starts now, once."""
        due: list[list[int]] = []
        while more := [name for name in self._roles if self._may_start(name)]:  # one may start as another has
            self._started.update(more)
            due += (self._nodes[name] for name in more)
        return due

    @property
    def waiting(self) -> dict[str, list[str]]:
        """The roles that have not started, with the services for which they wait."""
        return {
            name: [other for other in role["after"] if not self._is_ready(other)]
            for name, role in self._roles.items()
            if name not in self._started
        }

    def addresses(self, by_node: Mapping[int, str]) -> dict[str, list[str]]:
        """Return the addresses of each role's nodes."""
        return {name: [by_node[node] for node in nodes] for name, nodes in self._nodes.items()}

    def _may_start(self, name: str) -> bool:
        return name not in self._started and all(map(self._is_ready, self._roles[name]["after"]))

    def _is_ready(self, name: str) -> bool:
        return name in self._started and (not self._roles[name].get("ready") or self._up.issuperset(self._nodes[name]))


def variables(roles: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the variables by which a program finds the roles; `roles` has the addresses of each."""
    made = {}
    for name, addresses in roles.items():
        prefix = f"CLOUDTRAIN_ROLE_{name.upper().replace('-', '_')}"
        made.update({f"{prefix}_HOST": addresses[0], f"{prefix}_ADDRESSES": ",".join(addresses)})
    return made


def placeholders(roles: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return placeholder -> value for the addresses of the roles."""
    made = {}
    for name, addresses in roles.items():
        made.update({f"role.{name}.host": addresses[0], f"role.{name}.addresses": ",".join(addresses)})
    return made

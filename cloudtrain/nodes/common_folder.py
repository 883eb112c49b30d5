"""Download a folder of each node of a job into one folder; files of the same name that differ are all kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cloudtrain.errors import CloudtrainError, Unreachable
from cloudtrain.nodes.agents import Agent, call_all
from cloudtrain.nodes.transfer import SEND_S, Entry, download_entries, list_entries


def download_nodes(agents: Sequence[Agent], folder: str, into: Path) -> list[int]:
    """Download the folder of each node of a job, by rank, into one; blocking. Returns the ranks that were not reached.

    Where several nodes have a file of one name, the lowest rank's keeps it. An equal file is copied once; another one of
    node N goes below node-N/. Raises BackendError.
    """
    placed = _Placed(agents, folder)
    answers = call_all(lambda agent: list_entries(agent, folder), agents)
    missing = []
    for rank, entries in enumerate(answers):
        try:
            if isinstance(entries, CloudtrainError):
                raise entries
            download_entries(agents[rank], folder, into, placed.place(rank, entries))
        except Unreachable:
            missing.append(rank)
    return missing


class _Placed:
    """Which node's file has which name in the common folder."""

    def __init__(self, agents: Sequence[Agent], folder: str) -> None:
        self._agents, self._folder = agents, folder
        self._owners: dict[str, tuple[int, Entry]] = {}
        self._folders: set[str] = set()  # names of folders that hold such a file

    def place(self, rank: int, entries: Sequence[Entry]) -> list[tuple[Entry, str]]:
        """Return a node's files that are to be copied, each with its name in the common folder."""
        alone = [entry for entry in entries if not self._is_taken(entry.path)]
        placed = [self._add(rank, entry, entry.path) for entry in alone]
        others = [entry for entry in entries if entry not in alone]
        equal = self._equal(rank, others)
        for entry in others:
            if entry.path not in equal:
                name = entry.path
                while self._is_taken(name):
                    name = f"node-{rank}/{name}"
                placed.append(self._add(rank, entry, name))
        return placed

    def _add(self, rank: int, entry: Entry, name: str) -> tuple[Entry, str]:
        self._owners[name] = rank, entry
        self._folders.update(_parents(name))
        return entry, name

    def _is_taken(self, name: str) -> bool:
        return name in self._owners or name in self._folders or any(at in self._owners for at in _parents(name))

    def _equal(self, rank: int, entries: Sequence[Entry]) -> set[str]:
        """Return the paths under which a node has what is in the common folder under the same name; compares digests."""
        by_owner: dict[int, list[str]] = {}
        equal = set()
        for entry in entries:
            owner, known = self._owners.get(entry.path, (rank, entry))
            if owner == rank or known.path != entry.path or (known.size, known.target) != (entry.size, entry.target):
                continue
            if entry.target or entry.mtime_ns == known.mtime_ns:  # a copy, or the same file of a folder that is shared
                equal.add(entry.path)
            else:
                by_owner.setdefault(owner, []).append(entry.path)
        for owner, paths in by_owner.items():
            here, there = (
                self._agents[at].ask("digests", timeout_s=SEND_S, folder=self._folder, paths=paths).value
                for at in (rank, owner)
            )
            equal.update(path for path, one, other in zip(paths, here, there, strict=True) if one and one == other)
        return equal


def _parents(name: str) -> list[str]:
    return [name[:at] for at, letter in enumerate(name) if letter == "/"]

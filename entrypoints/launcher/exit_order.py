"""The order in which child processes exited, by pidfd and epoll."""

from __future__ import annotations

import os
import select


class ExitOrder:
    """Records the order in which watched processes ended.

    `waitpid` returns children in the order in which they were started. A pidfd becomes ready when its process exits, and
    Linux's epoll lists descriptors in the order in which they became ready. Elsewhere the order is not known.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") and hasattr(os, "pidfd_open") else None
        self._pids: dict[int, int] = {}
        self._order: list[int] = []

    def watch(self, pid: int) -> None:
        """Watch a child that has not been waited for."""
        if self._epoll is None:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return  # an old kernel, or a sandbox without this call
        self._epoll.register(descriptor, select.EPOLLIN)
        self._pids[descriptor] = pid

    def sorted(self, ended: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return (pid, wait status) pairs with the first that ended first; unknown ones stay behind, as they are."""
        if self._epoll is not None and self._pids:
            for descriptor, _ in self._epoll.poll(0):
                self._epoll.unregister(descriptor)
                os.close(descriptor)
                self._order.append(self._pids.pop(descriptor))
        position = {pid: number for number, pid in enumerate(self._order)}
        return sorted(ended, key=lambda end: position.get(end[0], len(position)))

"""Collective operations of torch.distributed: broadcast and gather objects, agree on decisions, process groups.

Every function works in a single process, where no process group exists.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from .clock import SYSTEM, Clock
from .errors import EXIT_REFUSED, Unsupported

T = TypeVar("T")

REFUSAL_WAIT_S = 15.0  # for the other ranks, which refuse as well or fail


class Agreement:
    """What all ranks decide alike after a step: to stop, or that a checkpoint is due.

    The flags of one step are reduced in the background and read after the next one, over CPU tensors: neither a host
    nor a device waits for it. Any rank may ask to stop; the clock of rank 0 decides what is due.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = cpu_group() if self._several else None
        self._pending: tuple[Any, Any] | None = None

    def settle(self, stop: bool, due: bool) -> tuple[bool, bool]:
        """Return (stop, due) as every rank has them; collective."""
        if not self._several:
            return stop, due
        import torch
        import torch.distributed as dist

        agreed = self.close()
        flags = torch.tensor([stop, due], dtype=torch.int32)
        self._pending = (flags, dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True))
        return agreed

    def close(self) -> tuple[bool, bool]:
        """Wait for what is under way and return it."""
        if self._pending is None:
            return False, False
        flags, work = self._pending
        self._pending = None
        work.wait()
        return bool(flags[0]), bool(flags[1])


def cpu_group() -> Any:
    """Return all ranks as a group that takes CPU tensors, which NCCL does not; collective."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else dist.group.WORLD


def own_group() -> Any:
    """Return all ranks as another group that takes CPU tensors, for a thread beside the training; None for one process.

    It waits for hours: a disk may be slow. Collective.
    """
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=timedelta(hours=6)) if dist.is_initialized() else None


def from_rank_0(make: Callable[[], T], group: Any = None) -> T:
    """Return on every rank what rank 0 makes; an error there is raised everywhere. Collective."""
    return from_rank(0, make, group)


def from_rank(owner: int, make: Callable[[], T], group: Any = None) -> T:
    """Return on every rank what one of them makes; an error there is raised everywhere. Collective."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return make()
    box: list[Any] = [None, None]
    if dist.get_rank() == owner:
        try:
            box = [make(), None]
        except Exception as error:
            box = [None, error]
    dist.broadcast_object_list(box, src=owner, group=group)
    if box[1] is not None:
        raise box[1]
    return box[0]  # type: ignore[no-any-return]


def from_leader(make: Callable[[], T], group: Any = None) -> T:
    """Return on every rank what the first rank of its machine makes; an error of one is raised everywhere. Collective."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return make()
    place, mine, error = int(os.environ.get("LOCAL_RANK", "0")), list[T](), None
    try:
        mine = [] if place else [make()]
    except Exception as raised:
        error = raised
    found = every_rank((mine, error), group)
    if errors := [raised for _, raised in found if raised is not None]:
        raise errors[0]
    return found[rank() - place][0][0]


def every_rank(mine: T, group: Any = None) -> list[T]:
    """Return what each rank has, by rank; collective."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def share(work: Sequence[Callable[[], T]], group: Any = None) -> list[T]:
    """Return what all the calls make, in their order, on every rank; each is done by one of them. Collective.

    An error of one rank is raised on all.
    """
    ranks, mine, error = world_size(), list[T](), None
    try:
        mine = [make() for make in work[rank() :: ranks]]
    except Exception as raised:
        error = raised
    found = every_rank((mine, error), group)
    for _, raised_there in found:
        if raised_there is not None:
            raise raised_there
    return [found[number % ranks][0][number // ranks] for number in range(len(work))]


def check_same(name: str, mine: str) -> None:
    """Raise Unsupported on every rank unless all have the same; collective."""
    values = every_rank(mine)
    if odd := [rank for rank, value in enumerate(values) if value != values[0]]:
        raise Unsupported(
            f"the {name} of rank {odd[0]} differs from rank 0's: use the same files and package versions on all nodes"
        )


def world_size() -> int:
    """Return how many ranks work together."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return which of them this is."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def leave(code: int) -> int:
    """Return the exit code; where there are several ranks, end the process with it at once.

    Taking a process group down waits for its threads while it holds the interpreter's lock, for which such a thread may
    be waiting to let go of a tensor: now and then a rank would stand there for ever. A refusal, which all ranks find by
    themselves, waits for the others for up to 15 s: one that still connects its groups would lose the connection.
    """
    if "torch.distributed" in sys.modules and world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        if code == EXIT_REFUSED:
            wait_for_refusals(REFUSAL_WAIT_S)
        os._exit(code)
    return code


def wait_for_refusals(timeout_s: float, clock: Clock = SYSTEM) -> bool:
    """Wait until every rank has called this, at most `timeout_s` seconds; True when all have. Needs no process group."""
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    deadline = clock.monotonic() + timeout_s
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
        count = store.add("cloudtrain/refusals", 1)
        while count < dist.get_world_size() and clock.monotonic() < deadline:
            clock.sleep(0.05)
            count = store.add("cloudtrain/refusals", 0)
    except (KeyError, RuntimeError):  # rank 0, whose store it is, has left: it saw all of them, or it failed
        return False
    return count == dist.get_world_size()

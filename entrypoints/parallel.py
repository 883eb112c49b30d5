"""How the ranks share the work: one table from the job's `parallelism` to what is configured, and what really runs.

Accelerate is the frame. Left alone it falls back to independent processes on CPU without a word, therefore the world is
checked before anything else is done, and the wrapper after it was put on.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from refused import Refused

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")


@dataclass(frozen=True)
class Strategy:
    """One row of the table: the wrapper that a model bears where there are several ranks."""

    wrapper: str | None  # class name
    several: bool = True  # ranks beyond one are possible


STRATEGIES: Mapping[str, Strategy] = {
    "none": Strategy(wrapper=None, several=False),
    "ddp": Strategy(wrapper="DistributedDataParallel"),
}


def chosen(parallelism: Mapping[str, Any], world_size: int) -> str:
    """Return the strategy's name; raises Refused for what this trainer does not carry, never replacing it."""
    name = str(parallelism.get("strategy") or ("ddp" if world_size > 1 else "none"))
    if name not in STRATEGIES:
        raise Refused(f"the shared trainer has no strategy {name}; it has {', '.join(STRATEGIES)}")
    if world_size > 1 and not STRATEGIES[name].several:
        raise Refused(f"strategy {name} is for one process, the job has {world_size} (leave it out, or write ddp)")
    for axis in ("tp_size", "pp_size", "cp_size"):
        if int(parallelism.get(axis) or 1) > 1:
            raise Refused(f"the shared trainer has no {axis} {parallelism[axis]} yet; leave it out")
    if parallelism.get("offload"):
        raise Refused(f"strategy {name} has nothing to offload; leave out parallelism.offload")
    return name


def accelerator(mixed_precision: str, world_size: int, **options: Any) -> Accelerator:
    """Return Accelerate's frame, in the world that the launcher promised; raises Refused in any other one."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    if not torch.cuda.is_available():
        # Without it every rank would train alone.
        if os.environ.setdefault("ACCELERATE_USE_CPU", "true").lower() not in ("1", "true", "yes", "on"):
            raise Refused("there is no GPU, and ACCELERATE_USE_CPU is off: leave it out of the job's env")
        if mixed_precision == "fp16":
            raise Refused("--fp16 needs a GPU; on CPU there is --bf16")
    elif mixed_precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise Refused("this GPU has no bfloat16; there is --fp16")
    if world_size == 1:  # Accelerate would make a group of one, and wrap the model for nobody's sake
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    # No model here has buffers that training changes; sending them before every forward pass would be for nothing.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    options = {"kwargs_handlers": [ddp], **options}
    made = Accelerator(mixed_precision=mixed_precision, step_scheduler_with_optimizer=False, **options)
    check_world(made.num_processes, world_size)
    return made


def check_world(found: int, promised: int) -> None:
    """Raise Refused unless as many processes work together as were started."""
    import torch.distributed as dist

    if found != promised or (dist.is_initialized() and dist.get_world_size() != promised):
        raise Refused(f"the job has {promised} processes, but {found} work together here")


def check_wrapper(model: Any, strategy: str, world_size: int) -> str:
    """Return the class name of what the model is wrapped in; raises Refused unless the strategy is what runs."""
    found = type(model).__name__
    expected = STRATEGIES[strategy].wrapper if world_size > 1 else None
    wrapped = found if hasattr(model, "module") else None
    if wrapped != expected:
        raise Refused(f"strategy {strategy} should wrap the model in {expected}, it is a {found}")
    return wrapped or "none"


def describe(model: Any, strategy: str, accelerator: Accelerator) -> dict[str, Any]:
    """Return the world as it really is, for the `world` event; collective."""
    mine = sum(parameter.numel() for parameter in model.parameters())
    return {
        "world_size": accelerator.num_processes,
        "strategy": strategy,
        "wrapper": check_wrapper(model, strategy, accelerator.num_processes),
        "parameters_per_rank": every_rank(mine)[:256],
        "device": accelerator.device.type,
        "mixed_precision": str(accelerator.mixed_precision),
    }


def settle_buckets(model: Any, loss: Callable[[], Any]) -> None:
    """Let DDP find the order of its buckets, as it does in the first step of all; gradients are to be zeroed after it.

    A resumed run begins with other buckets than the unbroken one has by then, and with three ranks or more the order of
    a sum, and so its last bit, depends on them. Collective.
    """
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel):
        loss().backward()


class Agreement:
    """What all ranks decide alike after a step: to stop, or that a checkpoint is due.

    The flags of one step are reduced in the background and heard after the next one, over CPU tensors: neither a host
    nor a device waits for it. Any rank may ask to stop; the clock of rank 0 decides what is due.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._several = dist.is_initialized() and dist.get_world_size() > 1
        self._pending: tuple[Any, Any] | None = None

    def settle(self, stop: bool, due: bool) -> tuple[bool, bool]:
        """Return (stop, due) as every rank has them; collective."""
        if not self._several:
            return stop, due
        import torch
        import torch.distributed as dist

        heard = self.close()
        flags = torch.tensor([stop, due], dtype=torch.int32)
        self._pending = (flags, dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True))
        return heard

    def close(self) -> tuple[bool, bool]:
        """Wait for what is under way and return it."""
        if self._pending is None:
            return False, False
        flags, work = self._pending
        self._pending = None
        work.wait()
        return bool(flags[0]), bool(flags[1])


def from_rank_0(make: Callable[[], T]) -> T:
    """Return on every rank what rank 0 makes; an error there is raised everywhere. Collective."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return make()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box = [make(), None]
        except Exception as error:
            box = [None, error]
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]  # type: ignore[no-any-return]


def every_rank(mine: T) -> list[T]:
    """Return what each rank has, by rank; collective."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def check_same(what: str, mine: str) -> None:
    """Raise Refused on every rank unless all have the same; collective."""
    found = every_rank(mine)
    if odd := [rank for rank, value in enumerate(found) if value != found[0]]:
        raise Refused(f"the {what} of rank {odd[0]} differs from rank 0's: the nodes need the same files and versions")


def world_size() -> int:
    """Return how many ranks work together."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def leave(code: int) -> int:
    """Return the exit code; where there are several ranks, end the process with it at once.

    Taking a process group down waits for its threads while it holds the interpreter's lock, for which such a thread may
    be waiting to let go of a tensor: now and then a rank would stand there for ever.
    """
    if "torch.distributed" in sys.modules and world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code

"""The ranks' common ground: Accelerate's frame for the layout that was asked for, the world as it really is, and what all
ranks say or decide together.

Left alone Accelerate falls back to independent processes on CPU without a word, therefore the world is checked before
anything else is done, and what the strategy made of the model after that.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from refused import Refused

if TYPE_CHECKING:
    from accelerate import Accelerator
    from arguments import Arguments
    from frame import Frame
    from layout import Layout

T = TypeVar("T")


def frame(layout: Layout, arguments: Arguments, **options: Any) -> Frame:
    """Return what carries the layout, in the world that the launcher promised; raises Refused in any other one."""
    import torch

    mixed_precision = arguments.mixed_precision
    if mixed_precision == "no":  # unless an Accelerate file says more
        mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    # The layout says it: Accelerate would wrap the model a second time, or in something else.
    for name in ("USE_FSDP", "USE_DEEPSPEED", "USE_PARALLELISM_CONFIG", "CONFIG_DS_FIELDS"):
        os.environ.pop(f"ACCELERATE_{name}", None)
    if mixed_precision == "fp16" and layout.carrier != "accelerate":
        raise Refused(f"--fp16 goes with strategies none and ddp only, not with {layout.described}; there is --bf16")
    if layout.offload and layout.carrier != "deepspeed" and not torch.cuda.is_available():
        raise Refused("there is no GPU from which parallelism.offload could take anything; leave it out")
    if layout.carrier == "deepspeed":
        import zero

        return zero.Zero(accelerator(mixed_precision, layout, **zero.options(layout, arguments), **options), layout)
    made = accelerator(mixed_precision, layout, **options)
    if layout.carrier == "accelerate":
        import frame as frames

        return frames.Frame(made, layout)
    if layout.carrier == "sharded":
        import sharded

        return sharded.Sharded(made, layout)
    import pipeline

    return pipeline.Pipeline(made, layout, arguments)


def accelerator(mixed_precision: str, layout: Layout, **options: Any) -> Accelerator:
    """Return Accelerate's frame; raises Refused for what this machine has not, or when the world is another one."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    if not torch.cuda.is_available():
        # Without it every rank would train alone.
        if os.environ.setdefault("ACCELERATE_USE_CPU", "true").lower() not in ("1", "true", "yes", "on"):
            raise Refused("there is no GPU, and ACCELERATE_USE_CPU is off: leave it out of the job's env")
        if mixed_precision == "fp16":
            raise Refused("--fp16 needs a GPU; on CPU there is --bf16")
        # transformers imports DeepSpeed where it is installed, which would warn in the log that there is no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if layout.carrier == "deepspeed":
            _deepspeed_on_cpu()
    elif mixed_precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise Refused("this GPU has no bfloat16; there is --fp16")
    if layout.world == 1 and layout.carrier == "accelerate":
        # Accelerate would make a group of one, and wrap the model for nobody's sake
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    # No model here has buffers that training changes; sending them before every forward pass would be for nothing.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    options = {"kwargs_handlers": [ddp], **options}
    made = Accelerator(mixed_precision=mixed_precision, step_scheduler_with_optimizer=False, **options)
    check_world(made.num_processes, layout.world)
    return made


def _deepspeed_on_cpu() -> None:
    """Let Accelerate and DeepSpeed find each other where there is no GPU; neither expects that.

    Accelerate sees one process only unless it is told the backend, and DeepSpeed would compile a kernel for shared memory
    when it begins, which takes minutes and a compiler: gloo does what it would do.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_USE_CPU"] = "false"
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)  # type: ignore[method-assign]


def check_world(found: int, promised: int) -> None:
    """Raise Refused unless as many processes work together as were started."""
    import torch.distributed as dist

    if found != promised or (dist.is_initialized() and dist.get_world_size() != promised):
        raise Refused(f"the job has {promised} processes, but {found} work together here")


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
        self._group = cpu_group() if self._several else None
        self._pending: tuple[Any, Any] | None = None

    def settle(self, stop: bool, due: bool) -> tuple[bool, bool]:
        """Return (stop, due) as every rank has them; collective."""
        if not self._several:
            return stop, due
        import torch
        import torch.distributed as dist

        heard = self.close()
        flags = torch.tensor([stop, due], dtype=torch.int32)
        self._pending = (flags, dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True))
        return heard

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
    import torch.distributed as dist

    if not dist.is_initialized():
        return make()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box = [make(), None]
        except Exception as error:
            box = [None, error]
    dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise box[1]
    return box[0]  # type: ignore[no-any-return]


def every_rank(mine: T, group: Any = None) -> list[T]:
    """Return what each rank has, by rank; collective."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=group)
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


def rank() -> int:
    """Return which of them this is."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


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

"""The order in which a training sees its samples: the same for any number of ranks, and resumed where it stood.

    sampler = cloudtrain_runtime.ResumableSampler(dataset, step_size=64, rank=run.rank, world_size=run.world_size)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    while sampler.epoch < 3:
        for batch in loader:
            ...                                  # at each optimizer step:
            sampler.trained()
            save(..., sampler.state_dict())

Standard library only until it is used; Python 3.9 on.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence, Sized
from typing import Any, Optional, Union


class ResumableSampler:
    """A sampler for torch's DataLoader, one epoch at a time; each epoch is in whole steps.

    A loader may fetch ahead: the position counts what `trained` was called with, not what was fetched. An epoch is filled up with
    its first samples, or with drop_last cut, to whole steps. Without a rank it gives every sample: Accelerate's
    `prepare` and the Trainer divide the batches themselves.

    Args:
        data: The data set, or its number of samples.
        step_size: Samples of one optimizer step, of all ranks and all accumulated batches together.
        seed: Seed of the order.
        shuffle: Whether each epoch has an order of its own; else the data set's.
        drop_last: Whether the last step of an epoch is left out where samples are missing.
        rank: This rank, in a loop that divides the samples by the sampler.
        world_size: The number of ranks that do.

    Raises:
        ValueError: The ranks cannot share a step evenly, or there is not one whole step.
    """

    def __init__(
        self,
        data: Union[Sized, int],
        step_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.size = data if isinstance(data, int) else len(data)
        self.step_size, self.seed, self.shuffle, self.drop_last = int(step_size), int(seed), shuffle, drop_last
        self.rank, self.world_size = rank, world_size
        self.steps = 0  # that were trained on since the run began
        if self.step_size < 1 or self.step_size % world_size:
            raise ValueError(f"step_size is {step_size}: it must be a multiple of the number of ranks, {world_size}")
        if self.steps_per_epoch < 1:
            raise ValueError(f"{self.size:,} samples make no step of {self.step_size:,}: lower step_size")

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return (self.size if self.drop_last else self.size + self.step_size - 1) // self.step_size

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self.steps // self.steps_per_epoch

    def trained(self, steps: int = 1) -> None:
        """Tell that optimizer steps were done.

        Args:
            steps: Their number.
        """
        self.steps += steps

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples from the next step to the end of its epoch."""
        order, share = self._order(self.epoch), self.step_size // self.world_size
        for step in range(self.steps % self.steps_per_epoch, self.steps_per_epoch):
            first = step * self.step_size + self.rank * share
            for place in range(first, first + share):
                yield int(order[place % self.size])  # beyond the end: its first samples

    def __len__(self) -> int:
        """Return this rank's samples of a whole epoch."""
        return self.steps_per_epoch * self.step_size // self.world_size

    def _order(self, epoch: int) -> Any:
        if not self.shuffle:
            return range(self.size)
        import torch

        digest = hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randperm(self.size, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step that was trained on; the same on all ranks."""
        return {"steps": self.steps, **self._facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last step of a state, on any number of ranks.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: It is the state of other data, or of another order.
        """
        for name, value in self._facts().items():
            if state.get(name) != value:
                raise ValueError(f"the state has {name} {state.get(name)}, this sampler {value}: they must be the same")
        self.steps = int(state["steps"])

    def _facts(self) -> dict[str, Any]:
        names = ("size", "step_size", "seed", "shuffle", "drop_last")
        return {name: getattr(self, name) for name in names}


class SeededBatches:
    """The batches of a loader's data set, whose random numbers depend on the epoch and the samples alone.

    Masks, crops and noise are drawn when a batch is fetched, ahead of the training. After a resume a rank would draw others,
    and dropout with them. Here neither takes numbers from the other. What draws on a GPU is not covered.

    Args:
        loader: torch's DataLoader of batches, which fetches them here from now on.
        seed: What the numbers depend on too.
    """

    @classmethod
    def of(cls, loader: Any, seed: int) -> Optional[SeededBatches]:
        """Return those of a loader, which may be Accelerate's; None where its samples come as a stream."""
        from torch.utils.data import IterableDataset

        inner = getattr(loader, "base_dataloader", loader)
        stream = inner.batch_sampler is None or isinstance(inner.dataset, IterableDataset)
        return None if stream else cls(inner, seed)

    def __init__(self, loader: Any, seed: int) -> None:
        import torch

        self.data, self._collate, self._seed = loader.dataset, loader.collate_fn, seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # a worker may live for several epochs
        object.__setattr__(loader, "dataset", self)
        loader.collate_fn = _whole

    def __len__(self) -> int:
        return len(self.data)

    def __getattr__(self, name: str) -> Any:
        if name == "data":  # while it is unpickled in a worker
            raise AttributeError(name)
        return getattr(self.data, name)

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a whole batch."""
        fetch = getattr(self.data, "__getitems__", None)
        with _random(f"{self._seed} {int(self.epoch)} {[int(index) for index in indices]}"):
            return self._collate(fetch(indices) if fetch else [self.data[index] for index in indices])


@contextlib.contextmanager
def _random(text: str) -> Iterator[None]:
    """Seed the random numbers of Python, NumPy and torch's CPU by a text, and go on with the former ones afterwards."""
    import random

    import numpy
    import torch

    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    before = random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


def _whole(batch: Any) -> Any:
    return batch

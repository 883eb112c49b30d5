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

import hashlib
from collections.abc import Iterator, Sized
from typing import Any, Union


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

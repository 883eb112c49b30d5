"""Unsupported: the error for what the trainer cannot do; ends the process with exit code 78."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata

EXIT_REFUSED = 78
NEEDED = {"torch": "2.8.0", "accelerate": "1.10.0", "transformers": "4.56.0"}
# With layers, stages or sequences over several ranks.
NEEDED_BY_MODEL_PARALLELISM = {"torch": "2.13.0", "accelerate": "1.15.0", "transformers": "5.23.0"}


class Unsupported(Exception):
    """The training cannot start, or not go on; str() is one sentence, with a hint where there is one."""


class Ended(Exception):
    """The training ends with exit code 1 for a known cause; str() is a sentence on that and on what is left."""


class Divergence:
    """Ends a training whose logged loss is not finite three times in a row; equal on all ranks."""

    MOST = 3

    def __init__(self) -> None:
        self.steps: list[int] = []  # of the last reports, as long as none was finite

    def update(self, step: int, loss: float) -> None:
        """Take a report; raises Ended for the third in a row."""
        self.steps = [] if math.isfinite(loss) else [*self.steps, step]
        self._loss = loss
        if len(self.steps) >= self.MOST:
            self.end()

    def end(self) -> None:
        """Raise Ended where the last report was not finite: such a model is not published."""
        if self.steps:
            since = f"in every report since step {self.steps[0]}" if len(self.steps) > 1 else f"at step {self.steps[0]}"
            raise Ended(
                f"the loss is {self._loss} {since}: the training has diverged. No model is published, and no checkpoint is "
                "saved after that step; lower the learning rate, clip gradients, or use bf16 instead of fp16"
            )


@contextmanager
def exit_when_unsupported(script: str = "train.py") -> Iterator[None]:
    """Print the reason and exit with 78 when the body raises Unsupported."""
    try:
        yield
    except Unsupported as error:
        print(f"{script}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_REFUSED) from None


def describe_missing(name: str, error: Exception) -> str:
    """Return why transformers has not loaded what `name` names, in one sentence: a folder here, or a model of the hub."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "couldn't connect to" not in line or os.path.isdir(name):
        return line
    missing = f"there is no folder {name} in the job's working directory"
    if "/" in name:  # as most names of the hub: the connection is the cause, or the path is wrong
        return f"{missing}, and {line}"
    hint = f"add {name} to the source or name it as an input, or open the network if {name} is a model of the hub"
    return f"{missing}, and the hub did not answer for a model of that name: {hint}"


def check_versions(splits_model: str = "") -> None:
    """Raise Unsupported where a library is absent or too old; imports none of them.

    Args:
        splits_model: the key of the job file that splits the model or its sequences over ranks, if one does.
    """
    versions = {}
    for name in NEEDED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise Unsupported(f"{name} is not installed (pip install 'cloudtrain[train]')") from None
    for sentence in old_versions(versions, splits_model):
        raise Unsupported(sentence)


def old_versions(versions: Mapping[str, str], splits_model: str = "", where: str = "here") -> Iterator[str]:
    """Yield a sentence for each library among these that is too old."""
    for what, needed in (("the shared trainer", NEEDED), (splits_model, NEEDED_BY_MODEL_PARALLELISM)):
        for name, oldest in needed.items() if what else ():
            if name in versions and _number(versions[name]) < _number(oldest):
                yield f"{what} needs {name} {oldest} or newer, {where} is {versions[name]}"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])

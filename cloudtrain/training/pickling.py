"""Pickle a model and the user's functions: modules of the user's own by value, parameters as references to files.

A model's parameters are written tensor by tensor beside the pickle (shipping.py). On a rank they are on the meta device
until the strategy reads this rank's part of each (entrypoints/trainer/in_memory_model.py). Large tensors and arrays of
anything else are in a file too, which a rank maps (parts_pickler.py).
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from cloudtrain.errors import BadRequest
from cloudtrain.functions.modules import by_value
from cloudtrain.functions.packing import Nowhere
from cloudtrain.functions.refusal import refusal
from cloudtrain.source.node_code import module

MAX_WITH_LISTS = 1 << 24  # bytes of a pickle that has lists of samples; of a larger one each sample is read by itself
DATA = ("data", "eval_data")


def stored_parameters(model: Any) -> tuple[dict[str, Any], str]:
    """Return the parameters that are written as files, by name, and why they are pickled instead where they are.

    Either all or none of a model's parameters are written.
    """
    import torch

    kinds = module("trainer.tensor_files").DTYPES
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if type(parameter) is not torch.nn.Parameter or parameter.layout != torch.strided:
            return {}, f"{name} is a {type(parameter).__name__} of its own kind"
        if parameter.dtype not in kinds:
            return {}, f"safetensors files have no {str(parameter.dtype).removeprefix('torch.')}, the type of {name}"
    memory = [each.untyped_storage().data_ptr() for each in parameters.values() if each.numel()]
    if len(set(memory)) < len(memory):
        return {}, "several of its parameters share memory"
    return parameters, ""


def dump(parts: Mapping[str, Any], folder: Path, stored: Mapping[str, Any]) -> int:
    """Pickle the parts; return how many bytes of the pickle each rank holds in memory.

    Args:
        parts: what is pickled, by name.
        folder: where `parts.pkl` is written, and beside it the memory of large tensors and arrays.
        stored: parameters of the model, by name, of which only name, shape and type are pickled.

    Raises:
        BadRequest: a part cannot be pickled.
    """
    from cloudtrain.training.parts_pickler import BesideFiles, PartsPickler, lists_of_samples

    path, whole = folder / "parts.pkl", _pickled_parameters(parts.get("model"), stored)
    lists = {key: each for name in DATA for key, each in lists_of_samples(parts.get(name)).items()}
    limit = MAX_WITH_LISTS + sum(whole.values()) if lists else None
    with by_value():
        while True:
            files = BesideFiles(folder, stored, frozenset(whole), lists if limit is None else {})
            try:
                with open(path, "wb") as stream:
                    PartsPickler(_Bounded(stream, limit), files).dump(parts)
                    files.arrays.close()
                return path.stat().st_size - sum(whole.values())
            except _TooLarge:
                limit = None
            except BadRequest:
                raise
            except Exception as error:  # whatever an object's own __reduce__ raises
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                files.discard()
                raise _refusal(parts, error, folder, stored) from error
            files.discard()


def _pickled_parameters(model: Any, stored: Mapping[str, Any]) -> dict[int, int]:
    """Return the sizes of the parameters that are pickled with their values, by the address of their memory."""
    import torch

    if model is None or stored:
        return {}
    own = [each for each in model.parameters() if each.layout == torch.strided]
    return {each.untyped_storage().data_ptr(): each.nbytes for each in own}


def _refusal(parts: Mapping[str, Any], error: Exception, folder: Path, stored: Mapping[str, Any]) -> BadRequest:
    """Return the error for parts that cannot be pickled."""
    from cloudtrain.training.parts_pickler import BesideFiles, PartsPickler

    def fails(obj: Any) -> bool:
        files = BesideFiles(folder, stored, frozenset(), {})
        try:
            PartsPickler(Nowhere(), files).dump(obj)
        except Exception:
            return True
        finally:
            files.discard()
        return False

    return refusal(parts, error, fails)


class _TooLarge(Exception):
    """The pickle is larger than its limit."""


class _Bounded:
    """A file to write to that may have a limit."""

    def __init__(self, stream: IO[bytes], limit: int | None) -> None:
        self.stream, self.left = stream, limit

    def write(self, piece: Any) -> int:
        if self.left is not None:
            self.left -= memoryview(piece).nbytes
            if self.left < 0:
                raise _TooLarge
        return self.stream.write(piece)

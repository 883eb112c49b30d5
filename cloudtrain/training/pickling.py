"""Pickle a model and the user's functions: modules of the user's own by value, parameters as references to files.

A model's parameters are written tensor by tensor beside the pickle (shipping.py). On a rank they are on the meta device
until the strategy reads this rank's part of each (entrypoints/trainer/in_memory_model.py).
"""

from __future__ import annotations

import io
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import IO, Any

from cloudtrain.errors import BadRequest
from cloudtrain.source.node_code import PACKAGE, module

MAX_BYTES = 1 << 30  # of a pickle without its parameters: every rank holds all of it
HINT = "save the data to a bucket (save_to_disk of `datasets`) and pass its URI, or write a job with `inputs`"


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


def dump(parts: Mapping[str, Any], stream: IO[bytes], stored: Mapping[str, Any], max_bytes: int) -> None:
    """Pickle the parts; of the stored parameters only name, shape and type. Tensors come from the CPU.

    Raises:
        BadRequest: the pickle is too large, or a part cannot be pickled.
    """
    import cloudpickle
    import torch

    names = {id(parameter): name for name, parameter in stored.items()}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> Any:
            if (name := names.get(id(obj))) is None:
                return None
            return name, tuple(obj.shape), obj.dtype, obj.requires_grad

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
                return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(4)  # type: ignore[no-untyped-call]
            if isinstance(
                obj, io.TextIOWrapper | io.BufferedReader | io.BufferedWriter | io.BufferedRandom | io.FileIO
            ):
                raise BadRequest(
                    f"an open file ({obj.name}) cannot be sent to the nodes",
                    "open it where it is read: in __getitem__, __iter__ or the function itself",
                )
            return super().reducer_override(obj)

    with _own_modules_by_value():
        try:
            Pickler(_Bounded(stream, max_bytes)).dump(parts)
        except BadRequest:
            raise
        except Exception as error:  # whatever an object's own __reduce__ raises
            reason = f"{type(error).__name__}: {error}"
            raise BadRequest(f"{_culprit(parts)} cannot be pickled: {reason}") from error


def _culprit(parts: Mapping[str, Any]) -> str:
    """Return which part cannot be pickled, and which attribute of it."""
    import cloudpickle

    def fails(obj: Any) -> bool:
        try:
            cloudpickle.Pickler(_Nowhere()).dump(obj)
        except Exception:
            return True
        return False

    for name, part in parts.items():
        if fails(part):
            attributes = [key for key, value in getattr(part, "__dict__", {}).items() if fails(value)]
            return f"{f'the attribute {attributes[0]} of ' if attributes else ''}{name} ({type(part).__name__})"
    return "model or data"


class _Nowhere:
    def write(self, piece: Any) -> int:
        return memoryview(piece).nbytes


class _Bounded:
    """A file to write to that refuses to grow beyond what may be sent."""

    def __init__(self, stream: IO[bytes], max_bytes: int) -> None:
        self.stream, self.left = stream, max_bytes

    def write(self, piece: Any) -> int:
        self.left -= memoryview(piece).nbytes
        if self.left < 0:
            raise BadRequest(f"the data is over {MAX_BYTES >> 20:,} MiB, and every rank would hold a copy", HINT)
        return self.stream.write(piece)


@contextmanager
def _own_modules_by_value() -> Iterator[None]:
    """Let classes of the user's own modules be pickled whole: the nodes have what is installed, and no more."""
    import cloudpickle

    installed = _installed()
    before = cloudpickle.list_registry_pickle_by_value()
    mine = [
        found
        for name, found in list(sys.modules.items())
        if name not in before
        and _is_own(name, found)
        and not os.path.realpath(str(found.__file__)).startswith(installed)
    ]
    for each in mine:
        cloudpickle.register_pickle_by_value(each)
    try:
        yield
    finally:
        for each in mine:
            cloudpickle.unregister_pickle_by_value(each)


def _is_own(name: str, module: Any) -> bool:
    """Return whether a module is a file's, and not ours; the script itself is pickled by value anyhow."""
    return (
        isinstance(module, ModuleType)
        and bool(getattr(module, "__file__", None))
        and module.__name__ == name
        and name != "__main__"
        and name.partition(".")[0] not in ("cloudtrain", PACKAGE)
    )


def _installed() -> tuple[str, ...]:
    """Return the folders of what is installed, and of Python itself."""
    paths = {path for name, path in sysconfig.get_paths().items() if name.endswith("lib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.realpath(path) + os.sep for path in paths)

"""What of a function travels: by name where its module is in the packaged source, else by value.

By value means cloudpickle: the code, what it captures, and the user's own modules that it uses. Large tensors and arrays
are in a file beside the pickle.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import io
import json
import os
import pickle
import pickletools
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from cloudtrain.errors import BadRequest
from cloudtrain.functions.modules import by_value, is_in, is_own
from cloudtrain.functions.refusal import named_arguments, plain, refusal
from cloudtrain.job.homes import new_file
from cloudtrain.source import node_code
from cloudtrain.source.node_code import CALL, module
from cloudtrain.source.secrets import credentials, search

FOLDER = CALL.rpartition("/")[0]
PICKLES = "cloudtrain_pickles"  # as call.py imports trainer/pickles
IN_COMMAND = 8192  # bytes of pickled arguments that are in the command line; more are a file of the bundle


@dataclass(frozen=True)
class Packed:
    """A function and its calls, as files."""

    source: Path | None  # the folder that has its module; None where nothing but the pickle travels
    named: bool  # the node imports the module of the function
    has_code: bool  # of the function or of an argument: it needs the Python that has pickled it
    digest: str  # of the function's pickle
    files: Mapping[str, Path]  # path in the bundle -> file here


def source_of(function: Callable[..., Any], given: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder to package: the one given, or the one from which the function's own module is imported.

    A function of a script, a notebook or another function has none: it travels by value, as beside a repository that is given.
    """
    if given is not None:
        return None if os.fspath(given).startswith("git+") else Path(given).absolute()
    module = sys.modules.get(function.__module__)
    if not _has_name(function) or module is None or not is_own(function.__module__, module):
        return None
    folder = Path(os.path.realpath(str(module.__file__))).parent
    inner = function.__module__.count(".") + (Path(str(module.__file__)).stem == "__init__")
    return Path(folder, *[os.pardir] * inner).resolve()


def pack(
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, Any]],
    source: Path | None,
    folder: Path,
    *,
    files: bool = False,
) -> tuple[Packed, list[bytes]]:
    """Pickle a function and the arguments of its calls.

    Args:
        function: the function itself, not its decorated object.
        calls: positional and keyword arguments of each call.
        source: the folder that is packaged, whose modules travel by name.
        folder: where the files are written.
        files: whether short arguments are in a file too, as those of a group, whose calls share a command.

    Returns:
        What is to be sent, and the pickles of the calls.

    Raises:
        BadRequest: something cannot travel.
        TypeError: the function does not take the arguments of a call.
    """
    import cloudpickle

    with suppress(ValueError):  # a function of C may have no signature
        signature = inspect.signature(function)
        for args, kwargs in calls:
            signature.bind(*args, **kwargs)
    named = _has_name(function)
    if named:
        module = sys.modules.get(function.__module__)
        named = is_in(module, source) or not is_own(function.__module__, module)
    with by_value(source):
        code = _dumps(
            (function.__module__, function.__qualname__) if named else function, function, folder / "function"
        )
        pickles = [
            _dumps(call, function, folder / str(at), f" of call {at}" if len(calls) > 1 else "")
            for at, call in enumerate(calls)
        ]
    sent = {f"{FOLDER}/cloudpickle/{path.name}": path for path in Path(cloudpickle.__file__).parent.glob("*.py")}
    sent |= {
        f"{FOLDER}/{PICKLES}/{path.name}": path for path in (node_code.folder() / "trainer" / "pickles").glob("*.py")
    }
    sent |= {f"{FOLDER}/{path.name}": path for path in folder.glob("*.arrays")}
    sent[CALL] = Path(__file__).with_name("call.py")
    for data in (code, *pickles):
        if len(data) <= credentials().MAX_BYTES and (found := search(_texts(data))):
            raise BadRequest(
                f"the function or an argument holds what looks like a credential ({found[0][1]})",
                "name it under secrets= and read it from the environment inside the function",
            )
    written = {"function.pkl": code}
    if files or not all(map(is_short, pickles)):
        starts = [*accumulate(map(len, pickles), initial=0)]
        written |= {"calls.pkl": b"".join(pickles), "calls.json": json.dumps(starts).encode()}
    for name, data in written.items():
        (folder / name).write_bytes(data)
        sent[f"{FOLDER}/{name}"] = folder / name
    has_code = any(b"cloudpickle.cloudpickle" in data for data in (code, *pickles))  # the module of its constructors
    return Packed(source, named, has_code, hashlib.sha256(code).hexdigest(), sent), pickles


def is_short(arguments: bytes) -> bool:
    """Return whether the pickle of a single call's arguments is in the command line instead of a file."""
    return len(arguments) <= IN_COMMAND


def text_folder(function: Callable[..., Any], parent: Path) -> Path:
    """Return a folder with the text of a function that travels by value, for `diff`, the plan's checks and the secrets guard."""
    named = plain(function)
    try:
        text = textwrap.dedent(inspect.getsource(named))
    except (OSError, TypeError):
        text = f"# {named.__qualname__}: its text is not known\n"
    folder = parent / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{named.__name__.strip('<>')}.py"
    if not path.exists():
        with new_file(path) as stream:
            stream.write(text.encode())
    return folder


def _has_name(function: Callable[..., Any]) -> bool:
    """Return whether an import finds a function by its name, decorated or not."""
    name = getattr(function, "__qualname__", "<object>")
    if function.__module__ == "__main__" or "<" in name:
        return False
    found: Any = sys.modules.get(function.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    return function in (found, getattr(found, "__wrapped__", None))


def _dumps(obj: Any, function: Callable[..., Any], path: Path, where: str = "") -> bytes:
    """Return the pickle of a function or of the arguments of a call.

    Args:
        obj: the function, its module and name, or the arguments.
        function: the function.
        path: without its suffix, the file of large tensors and arrays.
        where: which call it is, for an error.

    Raises:
        BadRequest: something cannot be pickled; it has the name of the variable.
    """
    stream = io.BytesIO()

    def parts() -> Mapping[str, Any]:
        return {plain(function).__name__: function} if obj is function else named_arguments(function, *obj)

    write(obj, stream, Path(f"{path}.arrays"), _pickler, parts, where)
    return stream.getvalue()


def write(
    obj: Any,
    stream: Any,
    path: Path,
    pickler: Callable[[Any, Any], Any],
    parts: Callable[[], Mapping[str, Any]],
    where: str = "",
) -> None:
    """Pickle an object, with its large tensors and arrays in a file beside it.

    Args:
        obj: the object.
        stream: where the pickle is written.
        path: the file beside it.
        pickler: makes the pickler of a stream and an `ArrayFile`.
        parts: returns what the object consists of, by the names of an error.
        where: what follows such a name.

    Raises:
        BadRequest: a part cannot be pickled, or there is no room for it.
    """

    def fails(part: Any) -> bool:
        arrays = array_file.ArrayFile(str(path))
        try:
            pickler(_Nowhere(), arrays).dump(part)
        except Exception:
            return True
        finally:
            arrays.discard()
        return False

    array_file = module("trainer.pickles.array_file")
    arrays = array_file.ArrayFile(str(path))
    try:
        pickler(stream, arrays).dump(obj)
        arrays.close()
    except BadRequest:
        raise
    except Exception as error:  # whatever an object's own __reduce__ raises
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadRequest(f"what is sent cannot be written in {path.parent}: {error}", "set TMPDIR") from error
        arrays.discard()
        raise refusal(parts(), error, fails, where) from error


def _pickler(stream: Any, arrays: Any) -> Any:
    pickler = module("trainer.pickles.pickler")

    class Pickler(pickler.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, obj: Any) -> Any:
            if pickler.is_on_gpu(obj):
                raise pickle.PicklingError(f"a {type(obj).__name__}")
            return super().reducer_override(obj)

    return Pickler(stream, arrays)


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, piece: Any) -> int:
        return memoryview(piece).nbytes


def _texts(data: bytes) -> bytes:
    """Return the texts and bytes of a pickle, a line each, without the zeros that mark a binary file."""
    found = (argument for _, argument, _ in pickletools.genops(data))
    texts = [text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text for text in found]
    return b"\n".join(text for text in texts if isinstance(text, bytes | bytearray)).replace(b"\0", b"\n")

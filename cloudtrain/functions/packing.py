"""What of a function travels: by name where its module is in the packaged source, else by value.

By value means cloudpickle: the code, what it captures, and the user's own modules that it uses. What cannot work on
another machine is refused with the name of the variable that holds it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import os
import pickle
import pickletools
import site
import socket
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from cloudtrain.errors import BadRequest
from cloudtrain.source.atomic import new_file
from cloudtrain.source.node_code import CALL, PACKAGE
from cloudtrain.source.secrets import search

FOLDER = CALL.rpartition("/")[0]
IN_COMMAND = 8192  # bytes of pickled arguments that are in the command line; more are a file of the bundle
MOST_SEARCHED = 1 << 20  # bytes of a pickle whose texts are searched for credentials
_MOST_ITEMS = 1000  # of a list or mapping, where a refusal looks for what cannot travel
_DEPTH = 4  # of objects in objects, where a refusal looks for the name of what cannot travel
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
_HINTS: Mapping[tuple[type, ...], tuple[str, str]] = {  # what has no meaning on another machine -> what to do instead
    _FILES: ("an open file", "open it on the node, inside the function that uses it"),
    (socket.socket,): ("a socket", "connect on the node, inside the function that uses it"),
    (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore, threading.Event): (
        "a lock",
        "create it on the node, inside the function that uses it",
    ),
    (GeneratorType,): ("a generator", "pass a list, or create it inside the function that uses it"),
}


@dataclass(frozen=True)
class Packed:
    """A function and its calls, as files."""

    source: Path | None  # the folder that has its module; None where nothing but the pickle travels
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
    if not _has_name(function) or module is None or not _is_own(function.__module__, module):
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
        files: whether short arguments become files too, as those of a group, whose calls share a command.

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
        named = _is_in(module, source) or not _is_own(function.__module__, module)
    with by_value(source):
        code = pickle.dumps((function.__module__, function.__qualname__)) if named else _dumps("", function, function)
        pickles = [_dumps(f" of call {at}" if len(calls) > 1 else "", call, function) for at, call in enumerate(calls)]
    own = Path(cloudpickle.__file__).parent
    sent = {f"{FOLDER}/cloudpickle/{path.name}": path for path in own.glob("*.py")}
    sent[CALL] = Path(__file__).with_name("call.py")
    for name, data in {"function.pkl": code, **{f"{at}.pkl": each for at, each in enumerate(pickles)}}.items():
        if len(data) <= MOST_SEARCHED and (found := search(_texts(data))):
            raise BadRequest(
                f"the function or an argument holds what looks like a credential ({found[0][1]})",
                "name it under secrets= and read it from the environment inside the function",
            )
        if data is code or files or not is_short(data):
            (folder / name).write_bytes(data)
            sent[f"{FOLDER}/{name}"] = folder / name
    has_code = any(b"cloudpickle.cloudpickle" in data for data in (code, *pickles))  # the module of its constructors
    return Packed(source, has_code, hashlib.sha256(code).hexdigest(), sent), pickles


def is_short(arguments: bytes) -> bool:
    """Return whether the pickle of a single call's arguments is in the command line instead of a file."""
    return len(arguments) <= IN_COMMAND


def plain(function: Callable[..., Any]) -> Any:
    """Return what has the name and the text of a callable: the function of a partial, the class of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__name__") else type(function)


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


# -- pickling ---------------------------------------------------------------------------------------------------------


def _dumps(where: str, obj: Any, function: Callable[..., Any]) -> bytes:
    """Return the pickle of a function or of its arguments; raises BadRequest with the name of what cannot be pickled."""
    stream = io.BytesIO()
    try:
        _pickler(stream).dump(obj)
    except Exception as error:  # whatever an object's own __reduce__ raises
        parts = {plain(function).__name__: function} if obj is function else named_arguments(function, *obj)
        raise refusal(parts, error, _fails, where) from error
    return stream.getvalue()


def refusal(parts: Mapping[str, Any], error: Exception, fails: Callable[[Any], bool], where: str = "") -> BadRequest:
    """Return the error for parts that cannot be pickled, with the name of the variable or attribute that cannot.

    Args:
        parts: what was pickled, by name.
        error: what the pickler raised.
        fails: whether an object cannot be pickled.
        where: what follows the name.
    """
    name, value = culprit(parts, fails)
    reason, hint = _reason(value, error)
    return BadRequest(f"{name or 'what is sent'}{where} cannot be sent: {reason}", hint)


def named_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the parameters; by position where those are not known."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    with suppress(ValueError):  # a function of C may have no signature
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    return {f"the argument {name}": value for name, value in given.items()}


def culprit(parts: Mapping[str, Any], fails: Callable[[Any], bool], depth: int = _DEPTH) -> tuple[str, Any]:
    """Return the name of the part that cannot be pickled, down to the variable or attribute that holds it, and its value."""
    for name, part in parts.items():
        if not fails(part):
            continue
        found, value = culprit(_inside(part), fails, depth - 1) if depth else ("", None)
        return (f"{found} of {name}", value) if found else (name, part)
    return "", None


def _inside(part: Any) -> dict[str, Any]:
    """Return what an object consists of, by name: what a function captures, attributes, items."""
    if isinstance(part, MethodType):
        return {"the object": part.__self__}
    if isinstance(part, functools.partial):
        return {"the function": part.func, "the arguments": part.args, "the arguments by name": part.keywords}
    function = getattr(part, "__wrapped__", part)
    if isinstance(function, FunctionType):
        return {f"the variable {name}": value for name, value in _captured(function) if value is not part}
    if isinstance(part, Mapping):
        return {f"the item {key!r}": value for key, value in islice(part.items(), _MOST_ITEMS)}
    if isinstance(part, list | tuple):
        return {f"the item {at}": value for at, value in enumerate(part[:_MOST_ITEMS])}
    return {f"the attribute {name}": value for name, value in getattr(part, "__dict__", {}).items()}


def _captured(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables outside of a function that its code names, and its defaults."""
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            yield name, cell.cell_contents
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _fails(part: Any) -> bool:
    try:
        _pickler(Nowhere()).dump(part)
    except Exception:
        return True
    return False


def _reason(value: Any, error: Exception) -> tuple[str, str]:
    for kinds, (what, hint) in _HINTS.items():
        if isinstance(value, kinds):
            return f"it is {what}", hint
    if _is_on_gpu(value):
        return f"it is a tensor on {value.device}, and the node may have no such device", "pass tensor.cpu()"
    return f"{type(error).__name__}: {error}", "create it on the node, inside the function that uses it"


def _is_on_gpu(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta")


def is_file(obj: Any) -> bool:
    """Return whether an object is an open file; cloudpickle would send the content of a text file."""
    return isinstance(obj, _FILES) and obj not in (sys.stdout, sys.stderr)


def _pickler(stream: Any) -> Any:
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if is_file(obj) or _is_on_gpu(obj):
                raise pickle.PicklingError(f"a {type(obj).__name__}")
            return super().reducer_override(obj)

    return Pickler(stream)


def _texts(data: bytes) -> bytes:
    """Return the texts and bytes of a pickle, a line each, without the zeros that mark a binary file."""
    found = (argument for _, argument, _ in pickletools.genops(data))
    texts = [text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text for text in found]
    return b"\n".join(text for text in texts if isinstance(text, bytes | bytearray)).replace(b"\0", b"\n")


class Nowhere:
    """A file that keeps nothing."""

    def write(self, piece: Any) -> int:
        return memoryview(piece).nbytes


# -- modules ----------------------------------------------------------------------------------------------------------

_REGISTRY = threading.RLock()  # cloudpickle's list of modules is one for all threads


@contextmanager
def by_value(source: Path | None = None) -> Iterator[None]:
    """Let the user's own modules be pickled whole, but for those of the packaged source: nodes have what is installed."""
    import cloudpickle

    with _REGISTRY:
        before = cloudpickle.list_registry_pickle_by_value()
        mine = [
            found
            for name, found in list(sys.modules.items())
            if name not in before and _is_own(name, found) and not _is_in(found, source)
        ]
        for each in mine:
            cloudpickle.register_pickle_by_value(each)
        try:
            yield
        finally:
            for each in mine:
                cloudpickle.unregister_pickle_by_value(each)


def _is_own(name: str, module: Any) -> bool:
    """Return whether a module is a file of the user's, neither installed nor ours; a script is pickled by value anyhow."""
    return (
        isinstance(module, ModuleType)
        and bool(getattr(module, "__file__", None))
        and module.__name__ == name
        and name != "__main__"
        and name.partition(".")[0] not in ("cloudtrain", PACKAGE)
        and not _is_installed(str(module.__file__))
    )


def _is_in(module: Any, source: Path | None) -> bool:
    """Return whether a node that starts in the packaged source finds a module there by its name."""
    if source is None or not getattr(module, "__file__", None):
        return False
    file = Path(os.path.realpath(module.__file__))
    place = Path(source.resolve(), *module.__name__.split("."))
    return file.with_name(file.name.partition(".")[0]) in (place, place / "__init__")


@functools.cache
def _is_installed(file: str) -> bool:
    return os.path.realpath(file).startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the folders of what is installed, and of Python itself."""
    paths = {path for name, path in sysconfig.get_paths().items() if name.endswith("lib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.realpath(path) + os.sep for path in paths)

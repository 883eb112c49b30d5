"""Call a pickled function on a node and keep what it returns: the script of `cloudtrain.function`.

    .cloudtrain/call/call.py              this file
    .cloudtrain/call/cloudpickle/         the very version that wrote the pickles
    .cloudtrain/call/cloudtrain_pickles/  entrypoints/trainer/pickles
    .cloudtrain/call/function.pkl         the function; by name where its module is in the source
    .cloudtrain/call/calls.pkl            the arguments of all calls, unless the command line has them
    .cloudtrain/call/calls.json           where in it each call begins, and its end

Each rank writes value-ATTEMPT-RANK.pkl, or error-ATTEMPT-RANK.json, below `returned` in its folder of outputs. Beside a
pickle, NAME.arrays has its large tensors and arrays. A pickle is code: these were made on the user's own machine and belong
to the job, as a script does; their digest is in its arguments. It runs on nodes without cloudtrain.

Modules that a short call does not need are imported where they are used: each costs every call some milliseconds.
"""

from __future__ import annotations

import binascii
import importlib
import importlib.util
import io
import json
import os
import sys
from typing import Any, NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
RETURNED = "returned"
EXIT_REFUSED = 78
MOST_TEXT = 100_000  # characters of a traceback that are kept


def main() -> int:
    # --digest of the pickle, --python that wrote code into it, --call of a group, --arguments as base64 of a pickle
    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))  # noqa: B905 - Python 3.9
    number, here = int(given.get("--call", 0)), f"{sys.version_info.major}.{sys.version_info.minor}"
    if (python := given.get("--python", here)) != here:
        return refuse(
            f"the function was pickled with Python {python}, and this node runs Python {here}: use the same on both"
        )
    sys.path[:] = [HERE, os.getcwd(), *(place for place in sys.path if place not in (HERE, os.getcwd()))]
    from cloudtrain_pickles import array_file, mapped, pickler  # type: ignore[import-not-found]

    sys.path.remove(HERE)
    pickles = Pickles(array_file.ArrayFile, mapped.Arrays, mapped.Unpickler, pickler.Pickler)
    with open(os.path.join(HERE, "function.pkl"), "rb") as stream:
        code = stream.read()
    if sha256(code) != given["--digest"]:
        return refuse("the pickle of the function is not the one that was submitted")
    if importlib.util.find_spec("cloudtrain") is None:
        sys.modules["cloudtrain"] = without_cloudtrain()
    if "--arguments" in given:
        arguments = binascii.a2b_base64(given["--arguments"])
    else:
        with open(os.path.join(HERE, "calls.json"), "rb") as stream:
            start, end = json.load(stream)[number : number + 2]
        with open(os.path.join(HERE, "calls.pkl"), "rb") as stream:
            stream.seek(start)
            arguments = stream.read(end - start)
    return call(pickles, code, arguments, number)


def refuse(reason: str) -> int:
    print(f"cloudtrain.function: {reason}", file=sys.stderr, flush=True)
    keep("error", "json", json.dumps({"type": "Refused", "text": reason}).encode())
    return EXIT_REFUSED


def sha256(data: bytes) -> str:
    """Return a digest without OpenSSL, which hashlib loads."""
    try:
        module = importlib.import_module("_sha2" if sys.version_info >= (3, 12) else "_sha256")
    except ImportError:
        module = importlib.import_module("hashlib")
    return str(module.sha256(data).hexdigest())


def without_cloudtrain() -> Any:
    """Return what a module imports as cloudtrain on a node that has none: its decorator, which changes nothing."""

    def function(call: Any = None, **_: Any) -> Any:
        return call if call is not None else lambda decorated: decorated

    module: Any = type(sys)("cloudtrain")
    module.function = function
    return module


class Pickles(NamedTuple):
    """What reads and writes pickles with arrays beside them."""

    ArrayFile: Any
    Arrays: Any
    Unpickler: Any
    Pickler: Any

    def load(self, data: bytes, path: str) -> Any:
        """Load a pickle; the path is that of its arrays, if it has any."""
        if not os.path.exists(path):
            return self.Unpickler(io.BytesIO(data), self.Arrays(None)).load()
        with open(path, "rb") as stream:
            return self.Unpickler(io.BytesIO(data), self.Arrays(stream)).load()

    def dumps(self, value: Any, path: str) -> bytes:
        """Return the pickle of a value, and write the file of its arrays, if it has any."""
        stream, arrays = io.BytesIO(), self.ArrayFile(path)
        try:
            self.Pickler(stream, arrays).dump(value)
            arrays.close()
        except BaseException:
            arrays.discard()
            raise
        return stream.getvalue()


def call(pickles: Pickles, code: bytes, arguments: bytes, number: int = 0) -> int:
    """Call the function and keep its value, or the exception that it raises."""
    try:
        function = pickles.load(code, os.path.join(HERE, "function.arrays"))
        if isinstance(function, tuple):
            module, name = function
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
        function = getattr(function, "__wrapped__", function) if is_ours(function) else function
        args, kwargs = pickles.load(arguments, os.path.join(HERE, f"{number}.arrays"))
        value = function(*args, **kwargs)
        try:
            kept = pickles.dumps(value, path_of("value", "arrays"))
        except Exception as error:
            reason = f"the returned value ({type(value).__name__}) cannot be pickled: {type(error).__name__}: {error}"
            raise TypeError(reason) from error
    except Exception as error:
        import traceback

        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this file's line
        traceback.print_exception(type(error), error, error.__traceback__)
        keep("error", "json", json.dumps(described(pickles, error)).encode())
        return 1
    keep("value", "pkl", kept)
    return 0


def is_ours(function: Any) -> bool:
    """Return whether a decorated function is the decorator's object, which submits; its call is wanted here."""
    return type(function).__module__ == "cloudtrain.functions.function"


def described(pickles: Pickles, error: Exception) -> dict[str, str]:
    """Return what is kept of an exception: readable as text, and as a pickle where it can be one."""
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        stream = io.BytesIO()
        pickler = pickles.Pickler(stream, None)
        pickler.refer = {}  # arrays too are in its pickle
        pickler.dump(error)
        kept = binascii.b2a_base64(stream.getvalue(), newline=False).decode()
    except Exception:
        kept = ""
    return {"type": type(error).__name__, "text": str(error), "traceback": text[-MOST_TEXT:], "pickle": kept}


def keep(kind: str, suffix: str, data: bytes) -> None:
    """Write a file of this rank, whole or not at all."""
    path = path_of(kind, suffix)
    with open(f"{path}.tmp", "wb") as stream:
        stream.write(data)
    os.replace(f"{path}.tmp", path)


def path_of(kind: str, suffix: str) -> str:
    """Return the path of a file of this rank; its folder is there."""
    folder = os.path.join(os.environ["CLOUDTRAIN_OUTPUT_DIR"], RETURNED)
    os.makedirs(folder, exist_ok=True)
    attempt, rank = os.environ.get("CLOUDTRAIN_ATTEMPT") or "1", os.environ.get("RANK") or "0"
    return os.path.join(folder, f"{kind}-{attempt}-{rank}.{suffix}")


if __name__ == "__main__":
    sys.exit(main())

"""Call a pickled function on a node and keep what it returns: the script of `cloudtrain.function`.

    .cloudtrain/call/call.py        this file
    .cloudtrain/call/cloudpickle/   the very version that wrote the pickles
    .cloudtrain/call/function.pkl   the function; by name where its module is in the source
    .cloudtrain/call/N.pkl          the arguments of call N, unless the command line has them

Each rank writes value-ATTEMPT-RANK.pkl, or error-ATTEMPT-RANK.json, below `returned` in its folder of outputs. A pickle is
code: these were made on the user's own machine and belong to the job, as a script does; their digest is in its arguments.
Standard library and cloudpickle only; it runs on nodes without cloudtrain.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import importlib.util
import json
import os
import sys
import traceback
import types
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
RETURNED = "returned"
EXIT_REFUSED = 78
MOST_TEXT = 100_000  # characters of a traceback that are kept


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default="", help="the version that wrote code into the pickle")
    parser.add_argument("--digest", required=True)
    parser.add_argument("--arguments", default="", help="base64 of a pickle")
    parser.add_argument("--call", type=int, default=0)
    given = parser.parse_args()
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if given.python and given.python != here:
        return refuse(f"the function was pickled with Python {given.python}, and this node runs Python {here}")
    sys.path[:] = [HERE, os.getcwd(), *(place for place in sys.path if place not in (HERE, os.getcwd()))]
    import cloudpickle

    sys.path.remove(HERE)
    with open(os.path.join(HERE, "function.pkl"), "rb") as stream:
        code = stream.read()
    if hashlib.sha256(code).hexdigest() != given.digest:
        return refuse("the pickle of the function is not the one that was submitted")
    if importlib.util.find_spec("cloudtrain") is None:
        sys.modules["cloudtrain"] = without_cloudtrain()
    if given.arguments:
        arguments = base64.b64decode(given.arguments)
    else:
        with open(os.path.join(HERE, f"{given.call}.pkl"), "rb") as stream:
            arguments = stream.read()
    return call(cloudpickle, code, arguments)


def refuse(reason: str) -> int:
    print(f"cloudtrain.function: {reason}", file=sys.stderr, flush=True)
    return EXIT_REFUSED


def without_cloudtrain() -> types.ModuleType:
    """Return what a module imports as cloudtrain on a node that has none: its decorator, which changes nothing."""

    def function(call: Any = None, **_: Any) -> Any:
        return call if call is not None else lambda decorated: decorated

    module = types.ModuleType("cloudtrain")
    module.function = function  # type: ignore[attr-defined]
    return module


def call(cloudpickle: Any, code: bytes, arguments: bytes) -> int:
    """Call the function and keep its value, or the exception that it raises."""
    try:
        function = cloudpickle.loads(code)
        if isinstance(function, tuple):
            module, name = function
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
        function = getattr(function, "__wrapped__", function) if is_ours(function) else function
        args, kwargs = cloudpickle.loads(arguments)
        value = function(*args, **kwargs)
        try:
            kept = dumps(cloudpickle, value)
        except Exception as error:
            reason = f"the returned value ({type(value).__name__}) cannot be pickled: {type(error).__name__}: {error}"
            raise TypeError(reason) from error
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this file's line
        traceback.print_exception(type(error), error, error.__traceback__)
        keep("error", "json", json.dumps(described(cloudpickle, error)).encode())
        return 1
    keep("value", "pkl", kept)
    return 0


def is_ours(function: Any) -> bool:
    """Return whether a decorated function is the decorator's object, which submits; its call is wanted here."""
    return type(function).__module__ == "cloudtrain.functions.function"


def dumps(cloudpickle: Any, value: Any) -> bytes:
    """Return the pickle of a value; tensors of a GPU become tensors of the CPU."""
    import io

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
                return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(4)
            return super().reducer_override(obj)

    stream = io.BytesIO()
    Pickler(stream).dump(value)
    return stream.getvalue()


def described(cloudpickle: Any, error: Exception) -> dict[str, str]:
    """Return what is kept of an exception: readable as text, and as a pickle where it can be one."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        kept = base64.b64encode(dumps(cloudpickle, error)).decode()
    except Exception:
        kept = ""
    return {"type": type(error).__name__, "text": str(error), "traceback": text[-MOST_TEXT:], "pickle": kept}


def keep(kind: str, suffix: str, data: bytes) -> None:
    """Write a file of this rank, whole or not at all."""
    folder = os.path.join(os.environ["CLOUDTRAIN_OUTPUT_DIR"], RETURNED)
    os.makedirs(folder, exist_ok=True)
    attempt, rank = os.environ.get("CLOUDTRAIN_ATTEMPT") or "1", os.environ.get("RANK") or "0"
    path = os.path.join(folder, f"{kind}-{attempt}-{rank}.{suffix}")
    with open(f"{path}.tmp", "wb") as stream:
        stream.write(data)
    os.replace(f"{path}.tmp", path)


if __name__ == "__main__":
    sys.exit(main())

"""What the call of a run's function has returned or raised, as its ranks have kept it (functions/call.py).

A pickle is code. It is loaded only where somebody asks for the value itself, and only of a run that the same user has
submitted from this history, unless the caller trusts it.
"""

from __future__ import annotations

import base64
import getpass
import json
import os
import pickle
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.errors import BadRequest, RunFailed
from cloudtrain.job import targets
from cloudtrain.runs.planning import fetched
from cloudtrain.runs.planning.plan import label
from cloudtrain.source import untrusted
from cloudtrain.source.node_code import CALL, module

if TYPE_CHECKING:
    from cloudtrain.history.records import RunRecord
    from cloudtrain.history.store import Store

MOST_ERROR = 1 << 26  # bytes of an exception
_KEPT = re.compile(r"(value|error)-(\d{1,9})-(\d{1,9})\.(?:pkl|json)")


class RemoteError(Exception):
    """Stands for an exception of a node that cannot be loaded here; its text has the exception's type and message."""


def is_call(run: RunRecord) -> bool:
    """Return whether a run is the call of a function."""
    return run.job.get("entrypoint") == CALL


def values(store: Store, run: RunRecord, trust: bool, ranks: int | None = None) -> list[Any]:
    """Return what the ranks of a run that has SUCCEEDED have returned, in their order, of the first `ranks` at most.

    Raises:
        BadRequest: The run is another user's or no function's, or has no such values.
    """
    if not is_call(run):
        raise BadRequest(f"{run.run_id} is not the call of a function", "its files come with fetch")
    _check_trust(run, trust)
    with _kept(store, run, "value") as (folder, names):
        if not names:
            raise BadRequest(f"{run.run_id} has left no value", f"cloudtrain logs {run.run_id}")
        found = []
        for name in names[:ranks]:
            beside = Path(name).with_suffix(".arrays").name
            with ExitStack() as files:
                stream, *arrays = (
                    files.enter_context(open(untrusted.open_file(folder, each), "rb"))
                    for each in (name, beside)
                    if each == name or os.path.lexists(folder / each)
                )
                problem = f"{run.run_id} has returned a value that cannot be loaded here"
                found.append(_load(stream, arrays[0] if arrays else None, problem))
        return found


def add_cause(store: Store, run: RunRecord, failure: RunFailed, trust: bool) -> None:
    """Make the exception of a failed call the cause of a failure, with the traceback of the node among its notes.

    Of another user's run only the text is read, as of an exception that cannot be loaded here.
    """
    try:
        with _kept(store, run, "error") as (folder, names):
            if not names:
                return
            about = json.loads(untrusted.read_file(folder, names[0], MOST_ERROR))
            texts = {name: str(about.get(name, "")) for name in ("type", "text", "traceback", "pickle")}
            failure.__cause__ = RemoteError(f"{texts['type']}: {texts['text']}")
            if texts["pickle"] and (trust or not _owner(run)):
                loaded = pickle.loads(base64.b64decode(texts["pickle"]))
                failure.__cause__ = loaded if isinstance(loaded, BaseException) else failure.__cause__
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # what is left is a report of the failure: it does not hide it
        failure.add_note(f"the exception of the node cannot be read: {type(error).__name__}: {error}")
    if failure.__cause__ is not None and texts["traceback"]:
        failure.__cause__.add_note(f"on the node:\n{texts['traceback']}")


@contextmanager
def _kept(store: Store, run: RunRecord, kind: str) -> Iterator[tuple[Path, list[str]]]:
    """Fetch what the ranks have kept into a folder of this block; its files of a kind and the last attempt, by rank."""
    with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
        last = store.attempts(run.run_id)[-1]
        packed = registry.traits(last.plan.backend).packs or run.attached  # then outputs are fetched whole
        fetched.fetch(store, run, Path(folder), ["outputs" if packed else fetched.RETURNED])
        at = Path(folder, fetched.RETURNED)
        found = [match for path in at.glob("*") if (match := _KEPT.fullmatch(path.name)) and match[1] == kind]
        newest = max((int(match[2]) for match in found), default=0)
        newest = max(newest, last.number)  # an exception of an earlier attempt is no cause of this one's end
        yield at, [match[0] for match in sorted(found, key=lambda match: int(match[3])) if int(match[2]) == newest]


def _load(stream: Any, arrays: Any, problem: str) -> Any:
    mapped = module("trainer.pickles.mapped")
    try:
        return mapped.Unpickler(stream, mapped.Arrays(arrays)).load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the class of an object raises, SystemExit too
        raise BadRequest(
            f"{problem}: {type(error).__name__}: {error}", "import here what the value consists of"
        ) from error


def _owner(run: RunRecord) -> str:
    """Return whose run it is, where it is not this user's own of this history; else ""."""
    submitter = targets.submitter(run.job.get("labels") or {})
    return str(run.attached or "") or ("" if submitter == label(getpass.getuser()) else str(submitter))


def _check_trust(run: RunRecord, trust: bool) -> None:
    if not trust and (owner := _owner(run)):
        raise BadRequest(
            f"the value of {run.run_id} is a pickle, which runs code when it is loaded, and the run is of {owner}",
            "result(trust=True) loads it",
        )

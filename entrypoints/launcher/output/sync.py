"""The run's folders in an object store: `output` is <URI>/<run id>/{checkpoints,outputs,model}.

At the start checkpoints of earlier attempts are brought back; during the run what has changed is uploaded; at the end
everything is. COMPLETE, which says that a checkpoint is whole, is uploaded after all that lies in and below its folder
and all that it names, and deleted before anything there is replaced. A checkpoint that is removed here goes from the
store when all that are whole here are whole there: what counts is what would outlive this node.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping

from ..errors import Refused
from ..log import Log
from ..manifest import Manifest
from ..status import now
from . import epochs, store
from .age import CheckpointAge

MARKER = "COMPLETE"
OURS = ".cloudtrain/"  # begins the name of a script of ours, which writes checkpoints
EVERY_S = 15.0
TRIES = 3  # of the last upload; the clients have tried each request several times by then

State = tuple[int, int]  # size and time of change of a file that was uploaded


class Sync:
    """Uploads this node's folders (name -> path) below <output>/<run id>."""

    def __init__(self, manifest: Manifest, folders: Mapping[str, str], log: Log) -> None:
        self._store = store.Store(f"{str(manifest.output).rstrip('/')}/{manifest.run_id}", "the output")
        self._attempt_id = manifest.attempt_id
        self._folders, self._log = folders, log
        self._known: dict[str, State] = {}  # what is in the store as it is here
        self._attempt = manifest.attempt
        self.epoch = 0  # this start's number, where this node has claimed the run
        self._doubtful: set[str] = set()  # marks here that do not say what is here
        self._failing = ""
        every_s = manifest.checkpoint.get("every_s")
        ours = manifest.argv[0].startswith(OURS)
        self.freshness = CheckpointAge(float(str(every_s)) if every_s else None, ours, log.event)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._interval_s = float(os.environ.get("CLOUDTRAIN_SYNC_EVERY_S") or EVERY_S)

    def open(self, node_rank: int) -> None:
        """Claim the run, bring checkpoints back and show that the output can be written; blocking. Raises Refused,
        OSError."""
        try:
            if node_rank == 0:
                # Before anything is listed: what an earlier start still removes it has checked before this.
                self.epoch = epochs.claim(self._store, self._attempt, epochs.here(self._folders["checkpoints"]))
            self._bring_back()
            text = json.dumps({"attempt": self._attempt_id, "node": node_rank, "started_at": now()})
            self._store.write(f"attempts/{self._attempt_id}-node-{node_rank}.json", text.encode())
        except store.Failed as error:
            raise Refused(f"the output cannot be used: {error}") from None

    def start(self) -> None:
        """Upload in the background from now on."""
        self.freshness.begin(any(_is_mark(name) for name in self._known))
        self._thread = threading.Thread(target=self._run, name="sync", daemon=True)
        self._thread.start()

    def finish(self, broken_off: Callable[[], bool], succeeded: bool) -> str:
        """Upload what is left; return "" or why the store does not have everything. Blocking, until `broken_off`.

        What a run that succeeded has removed goes, even where no checkpoint is left.
        """
        if self._thread is None:
            return ""
        self._end.set()
        words: list[str] = []
        last = threading.Thread(target=lambda: words.append(self._last(succeeded)), daemon=True)
        last.start()
        while last.is_alive():
            last.join(0.2)
            if last.is_alive() and broken_off():
                return f"the upload to {self._store.uri} was broken off"
        return words[0] if words else f"the upload to {self._store.uri} failed"

    def _bring_back(self) -> None:
        """Copy checkpoints from the store that this node does not have, COMPLETE last in each."""
        folder = self._folders["checkpoints"]
        found = self._store.list("checkpoints")
        try:
            store.check_names("checkpoints", list(found))
        except Refused:
            raise Refused(f"{self._store.uri}/checkpoints holds an object whose name cannot be a file's") from None
        wanted = [name for name in found if self._is_wanted(folder, name, found)]
        if not wanted:
            return
        size = store.format_bytes(sum(found[name][0] for name in wanted))
        self._log.say(f"output: bringing {len(wanted)} files of checkpoints, {size}, back from {self._store.uri}")

        def fetch(name: str) -> None:
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._store.get(f"checkpoints/{name}", path)
            self._known[f"checkpoints/{name}"] = _state(path)

        for marks in (False, True):
            batch = [name for name in wanted if _is_mark(name) is marks]
            errors = store.all_at_once([lambda name=name: fetch(name) for name in batch])  # type: ignore[misc]
            if errors:
                raise errors[0]

    def _is_wanted(self, folder: str, name: str, found: Mapping[str, object]) -> bool:
        """What is here stays, but for a checkpoint that is whole in the store and not here."""
        place = os.path.dirname(name)
        mark = f"{place}/{MARKER}" if place else MARKER
        if mark in found and not os.path.exists(os.path.join(folder, mark)):
            return True
        return not os.path.exists(os.path.join(folder, name))

    def _run(self) -> None:
        while not self._end.wait(self._interval_s):
            problem = self._turn(False)
            if problem and problem != self._failing:
                self._log.say(f"output: {problem}; it is tried again")
                self._log.event("alarm", reason=f"the output cannot be brought up to date: {problem}")
            elif self._failing and not problem:
                self._log.say("output: it is up to date again")
            self._failing = problem

    def _turn(self, succeeded: bool) -> str:
        """Bring the store up to date and return "" or why it is not."""
        self.freshness.doing("the upload")
        try:
            problem = self._pass(succeeded)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self.freshness.doing("")
        self.freshness.went(problem)
        return problem

    def _last(self, succeeded: bool) -> str:
        if self._thread is not None:
            self._thread.join()
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(2.0**attempt)
            problem = self._turn(succeeded)
            if not problem:
                self._log.say(f"output: {len(self._known)} files are at {self._store.uri}")
                return ""
        return problem

    def _pass(self, succeeded: bool) -> str:
        """Upload what has changed since the last pass, and return "" or the first thing that went wrong."""
        if reason := self._replaced():
            return reason
        here = self._files()
        for name in filter(_is_mark, here):
            self.freshness.written(name)
        states = {name: _state(path) for name, path in here.items()}
        # Without a state it has gone since it was listed: that is no change to it, and the next pass's matter.
        changed = {name for name, state in states.items() if state and self._known.get(name) != state}
        gone = {name for name in self._known if name.startswith("checkpoints/") and name not in here}
        # Who removes a checkpoint begins with its mark: one that was listed and is gone now went before what it covers.
        removed = {name for name in here if _is_mark(name) and not os.path.exists(here[name])}
        gone |= {name for name in removed if name in self._known}
        here = {name: path for name, path in here.items() if name not in removed}
        problems: list[str] = []

        def attempt(call: Callable[[], object]) -> Callable[[], object]:
            def guarded() -> None:
                try:
                    call()
                except FileNotFoundError:
                    pass  # the script has removed it meanwhile
                except Exception as error:
                    problems.append(str(error))

            return guarded

        # A mark in the store must not stand over files that are being replaced, or removed from under a mark here.
        marked = [name for name in self._known if _is_mark(name)]
        broken = [name for name in marked if _holds_any(name, changed) or (name in here and _holds_any(name, gone))]
        retired = [name for name in marked if name in gone and name not in broken]
        store.all_at_once([attempt(lambda name=name: self._delete(name)) for name in broken])  # type: ignore[misc]
        if problems:
            return problems[0]
        files = sorted(name for name in changed if not _is_mark(name))
        store.all_at_once([attempt(lambda name=name: self._put(name, here[name])) for name in files])  # type: ignore[misc]
        if reason := self._replaced():  # while those were on their way
            return reason
        marks = [name for name in here if _is_mark(name) and (name in changed or name in broken)]
        for name in sorted(marks, key=lambda mark: -mark.count("/")):
            if self._is_doubtful(name, here[name]):
                continue
            if self._is_whole(name, here[name]):
                attempt(lambda name=name: self._put(name, here[name]))()  # type: ignore[misc]
                if name in self._known:
                    self.freshness.arrived(name)
        if retired and not problems and self._may_retire(succeeded) and not self._replaced():
            store.all_at_once([attempt(lambda name=name: self._delete(name)) for name in retired])  # type: ignore[misc]
            retired = [name for name in retired if name in self._known]
        spared = {name for name in gone if any(_holds(mark, name) for mark in retired)}
        removals = sorted(name for name in gone - spared if name in self._known)
        store.all_at_once([attempt(lambda name=name: self._delete(name)) for name in removals])  # type: ignore[misc]
        return problems[0] if problems else ""

    def _replaced(self) -> str:
        """Return "" or that a later start of the run has claimed the output: then nothing here is its business any
        more."""
        later = epochs.newest(self._store) if self.epoch else 0
        if later <= self.epoch:
            return ""
        return f"start {later} of this run has claimed {self._store.uri}, nothing of this one ({self.epoch}) goes there"

    def _is_whole(self, mark: str, path: str) -> bool:
        """Return whether the store has all that lies below a mark here, and all that the mark names."""
        folder = os.path.dirname(mark)
        below = self._files(folder)
        if not all(self._known.get(name) == _state(at) for name, at in below.items() if name != mark):
            return False
        return all(self._known.get(f"{folder}/{name}", (-1, 0))[0] == size for name, size in named(path).items())

    def _is_doubtful(self, mark: str, path: str) -> bool:
        """Return whether a mark here names what is not here, and say so once: it is not uploaded."""
        folder = os.path.dirname(path)
        for name, size in named(path).items():
            found = _state(os.path.join(folder, name))
            if (found is None or found[0] != size) and os.path.exists(path):  # else it is being removed
                if mark not in self._doubtful:
                    self._log.say(f"output: {mark} is not uploaded, for {name} beside it is not what it says")
                self._doubtful.add(mark)
                return True
        self._doubtful.discard(mark)
        return False

    def _may_retire(self, succeeded: bool) -> bool:
        """Return whether the store has every checkpoint that is whole here, and there is one, or none is needed."""
        marks = {
            name: path
            for name, path in self._files("checkpoints").items()
            if _is_mark(name) and name not in self._doubtful
        }
        return (bool(marks) or succeeded) and all(self._known.get(name) == _state(at) for name, at in marks.items())

    def _put(self, name: str, path: str) -> None:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise store.Failed(f"{name!r} cannot be named in an object store") from None
        before = _state(path)
        self._store.put(path, name)
        after = _state(path)
        if after == before or after is None:  # else it was written to meanwhile, and goes again
            self._known[name] = before  # of one that is gone too, which the next pass then removes

    def _delete(self, name: str) -> None:
        self._store.delete(name)
        self._known.pop(name, None)

    def _files(self, below: str = "") -> dict[str, str]:
        """Return name in the store -> path of all regular files (links to files count), below one folder of it."""
        found = {}
        for top, folder in self._folders.items():
            if below and below != top and not below.startswith(f"{top}/"):
                continue
            for place, _, names in os.walk(os.path.join(folder, below[len(top) + 1 :]) if below else folder):
                inner = os.path.relpath(place, folder).replace(os.sep, "/")
                for name in names:
                    path = os.path.join(place, name)
                    if os.path.isfile(path) and not name.startswith(store.PARTIAL):
                        found["/".join(part for part in (top, inner if inner != "." else "", name) if part)] = path
        return found


def _is_mark(name: str) -> bool:
    return name.rpartition("/")[2] == MARKER


def _holds(mark: str, name: str) -> bool:
    return name.startswith(mark[: -len(MARKER)])


def _holds_any(mark: str, names: set[str]) -> bool:
    return any(_holds(mark, name) for name in names if name != mark)


def named(path: str) -> dict[str, int]:
    """Return the files that a mark names and their sizes; none where it is another tool's."""
    try:
        with open(path, "rb") as file:
            files = json.loads(file.read())["files"]
        return {str(name): int(entry["size"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _state(path: str) -> State | None:
    """Return size and time of change, None for a file that is gone."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns

"""Sync the run's folders with an object store: `output` is <URI>/<run id>/{checkpoints,outputs,model}.

At the start checkpoints of earlier attempts are brought back; during the run what has changed is uploaded; at the end
everything is. COMPLETE, which says that a checkpoint is whole, is uploaded after all that lies in and below its folder
and all that it names, and deleted before anything there is replaced. A checkpoint that is removed here goes from the
store when all that are whole here are whole there: what counts is what survives this node. A kept file that the script
removed goes too, when all that is here is there.

Nodes of the shared trainer that share no folder each upload the parts that their ranks wrote, under names that no other
start uses. Node 0 alone, which has claimed the run, uploads COMPLETE when the store has all parts, and removes checkpoints.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping

from .. import fence
from ..errors import Refused
from ..log import Log
from ..manifest import OURS, Manifest
from ..status import now
from . import epochs, store
from .age import CheckpointAge
from .listing import State, list_files, state_of
from .marks import Marks
from .upload_plan import (
    COMPLETE,
    MARKER,
    REMOVE,
    RETIRE,
    UPLOAD,
    WITHDRAW,
    Action,
    covers,
    is_mark,
    left_to_node_0,
    plan_upload,
)

OUTPUTS = "outputs/"
NOT_AS_HERE: State = (-1, -1)
EVERY_S = 15.0
PAUSE_S = 1.0
PARTS_S = 120.0  # how long node 0 waits at the end for the parts of other nodes
TRIES = 3  # of the last upload; the clients have tried each request several times by then

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from .keep import Keeper


class Sync:
    """Uploads this node's folders (name -> path) below <output>/<run id>."""

    def __init__(
        self,
        manifest: Manifest,
        folders: Mapping[str, str],
        log: Log,
        keeper: Keeper | None = None,  # where the job keeps files of the working directory
    ) -> None:
        self._keeper = keeper
        self._absent: set[str] = set()  # kept files in the store that the last pass has not found here
        self._is_last = False  # nothing moves here any more
        self._store = store.Store(f"{str(manifest.output).rstrip('/')}/{manifest.run_id}", "the output", log.clock)
        self._attempt_id, self._is_service = manifest.attempt_id, manifest.is_service
        self._folders, self._log = folders, log
        self._stored: dict[str, State] = {}  # what is in the store as it is here
        self._attempt = manifest.attempt
        self.replaced = ""  # why this start is to end, as the last pass found it
        self.epoch = 0  # this start's number, where this node has claimed the run
        self._claiming = threading.Lock()
        self._marks = Marks(self._store, folders, self._stored, log)
        self.report = self._marks.report
        self._failing = ""
        every_s = manifest.checkpoint.get("every_s")
        ours = manifest.is_ours
        self._in_parts = ours and manifest.main_nodes > 1  # a checkpoint's files may come from several nodes
        self._follows = False  # node 0 says which checkpoints stand
        self.freshness = CheckpointAge(float(str(every_s)) if every_s else None, ours, log.event, log.clock)
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._interval_s = float(os.environ.get("CLOUDTRAIN_SYNC_EVERY_S") or EVERY_S)

    def open(self, node_rank: int) -> None:
        """Claim the run, bring its files back but to a service, and write a first object to the output; blocking.

        Raises Refused, OSError.
        """
        self._follows = self._in_parts and node_rank > 0
        try:
            if node_rank == 0:
                # Before anything is listed: what an earlier start still removes it has checked before this.
                self.epoch = epochs.claim(
                    self._store, self._attempt, fence.newest(self._folders["checkpoints"]), self._log.clock
                )
            if not self._is_service:
                # Of a run that was on SageMaker the history lies there too.
                self._restore("checkpoints", self._folders["checkpoints"], lambda name: not name.startswith(OURS))
            if self._keeper is not None and not self._is_service:
                self._restore("kept", self._folders["kept"])
                self._restore("outputs", self._folders["outputs"], self._keeper.wants)
                self._restore("model", self._folders["model"])
            text = json.dumps({"attempt": self._attempt_id, "node": node_rank, "started_at": now(self._log.clock)})
            self._store.write(f"attempts/{self._attempt_id}-node-{node_rank}.json", text.encode())
        except store.Failed as error:
            raise Refused(f"the output cannot be used: {error}") from None

    def claim_next(self) -> None:
        """Claim the epoch after this one, for ranks that start again; blocking. Raises Refused where a later start has it."""
        try:
            with self._claiming:
                if self.epoch and not epochs.claim_number(self._store, self._attempt, self.epoch + 1, self._log.clock):
                    raise Refused(f"a later start of this run writes to {self._store.uri}")
                self.epoch += self.epoch > 0
        except store.Failed as error:
            self._log.warn(f"the restart could not be recorded in the output: {error}")

    def start(self) -> None:
        """Upload in the background from now on."""
        self.freshness.begin(any(is_mark(name) for name in self._stored))
        self._thread = threading.Thread(target=self._run, name="sync", daemon=True)
        self._thread.start()

    def finish(self, broken_off: Callable[[], bool], succeeded: bool) -> str:
        """Upload what is left; return "" or why the store does not have everything. Blocking, until `broken_off`.

        What a run that succeeded has removed goes, even where no checkpoint is left.
        """
        if self._thread is None:
            return ""
        self._end.set()
        if not succeeded and (left := self._left()):
            self._log.say(f"output: uploading {left}, complete checkpoints first")
        results: list[str] = []
        last = threading.Thread(target=lambda: results.append(self._last(succeeded)), daemon=True)
        last.start()
        while last.is_alive():
            last.join(0.2)
            if last.is_alive() and broken_off():
                left = self._left()
                return f"the upload to {self._store.uri} was interrupted" + (f": {left} were left" if left else "")
        return results[0] if results else f"the upload to {self._store.uri} failed"

    def _left(self) -> str:
        """Return which files the store does not have, or has otherwise; "" for none."""
        from .keep_report import describe  # only here: it costs every job some milliseconds

        states = {name: state_of(path) for name, path in list_files(self._folders).items()}
        sizes = {name: state[0] for name, state in states.items() if state and self._stored.get(name) != state}
        return describe(sizes) if sizes else ""

    def _restore(self, top: str, folder: str, is_kept: Callable[[str], bool] = lambda _: True) -> None:
        """Copy files from the store that this node does not have, COMPLETE last in each checkpoint."""
        objects = {name: about for name, about in self._store.list(top).items() if is_kept(name)}
        try:
            store.check_names(top, list(objects))
        except Refused:
            raise Refused(f"{self._store.uri}/{top} has an object whose name is not a valid file name") from None
        wanted = [name for name in objects if self._is_wanted(folder, name, objects)]
        if self._keeper is not None and top == "outputs":  # what is here is brought there again, or removed
            self._stored.update((f"{top}/{name}", NOT_AS_HERE) for name in objects)
        if not wanted:
            return
        size = store.format_bytes(sum(objects[name][0] for name in wanted))
        self._log.say(
            f"output: downloading {len(wanted)} file{'s' * (len(wanted) != 1)} of {top}, {size} from {self._store.uri}"
        )

        def fetch(name: str) -> None:
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._store.get(f"{top}/{name}", path)
            self._stored[f"{top}/{name}"] = state_of(path)

        for marks in (False, True):
            batch = [name for name in wanted if is_mark(name) is marks]
            errors = store.all_at_once([lambda name=name: fetch(name) for name in batch])  # type: ignore[misc]
            if errors:
                raise errors[0]

    def _is_wanted(self, folder: str, name: str, objects: Mapping[str, object]) -> bool:
        """What is here stays, but for a checkpoint that is whole in the store and not here."""
        parent = os.path.dirname(name)
        mark = f"{parent}/{MARKER}" if parent else MARKER
        if mark in objects and not os.path.exists(os.path.join(folder, mark)):
            return True
        return not os.path.exists(os.path.join(folder, name))

    def _run(self) -> None:
        while not self._log.clock.wait(self._end, self._interval_s):
            problem = self._turn(False)
            if problem and problem != self._failing:
                self._log.say(f"output: {problem}; retrying")
                self._log.event("alarm", reason=f"uploading to the output failed: {problem}")
            elif self._failing and not problem:
                self._log.say("output: uploading to the output works again")
            self._failing = problem

    def _turn(self, succeeded: bool) -> str:
        """Bring the store up to date and return "" or why it is not."""
        self.freshness.doing("the upload")
        try:
            problem = self._upload(succeeded)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self.freshness.doing("")
        self.freshness.went(problem)
        return problem

    def _last(self, succeeded: bool) -> str:
        if self._thread is not None:
            self._thread.join()
        self._is_last = True
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                self._log.clock.sleep(2.0**attempt)
            problem = self._turn(succeeded)
            if not problem:
                problem = self._await_parts(succeeded)
                if not problem:
                    count = len(self._stored)
                    self._log.say(
                        f"output: {count} file{' was' if count == 1 else 's were'} uploaded to {self._store.uri}"
                    )
                return problem
            if self.replaced:
                break
        return problem

    def _await_parts(self, succeeded: bool) -> str:
        """Wait until the store has the newest checkpoints, parts of other nodes included; return "" or what lacks."""
        until = self._log.clock.monotonic() + PARTS_S
        while mark := "" if self._follows else self._marks.waiting():
            if self._log.clock.monotonic() >= until:
                return f"{mark} is incomplete: parts from other nodes are missing"
            self._log.clock.sleep(PAUSE_S)
            if problem := self._turn(succeeded):
                return problem
        return ""

    def _upload(self, succeeded: bool) -> str:
        """Upload what has changed since the last time, and return "" or the first thing that went wrong."""
        if reason := self._look_for_later():
            return reason
        reports = self._marks.take_reports()
        paths = list_files(self._folders)
        for name in filter(is_mark, paths):
            self.freshness.written(name)
        listed = {name: state_of(path) for name, path in paths.items()}
        # Looked at after all states: a mark that is still there was not withdrawn before what it covers was looked at.
        withdrawn = {name for name, path in paths.items() if is_mark(name) and not os.path.exists(path)}
        problem = self._apply(plan_upload(self._stored, listed, withdrawn, self._removed(paths)), paths, succeeded)
        self._marks.send_reports(reports, listed)
        return problem

    def _removed(self, paths: Mapping[str, str]) -> set[str]:
        """Return the kept files that the script has removed: not found in two passes, for one that is renamed is for a
        moment under neither name."""
        if self._keeper is None:
            return set()
        kept = {name for name in self._stored if name.startswith(OUTPUTS)}
        absent = {n for n in kept if n not in paths and self._keeper.is_kept_output(n[len(OUTPUTS) :])}
        twice, self._absent = absent & self._absent, absent
        return absent if self._is_last else twice

    def _apply(self, actions: list[Action], paths: Mapping[str, str], succeeded: bool) -> str:
        """Do the actions in their order, each kind when it is its turn; return "" or the first thing that went wrong."""
        problems: list[str] = []
        if self._follows:
            actions, forgotten = left_to_node_0(actions)
            for name in forgotten:
                self._stored.pop(name, None)

        def names(kind: str) -> list[str]:
            return [action.name for action in actions if action.kind == kind]

        def do(what: Callable[[str], None], some: list[str]) -> None:
            store.all_at_once([lambda name=name: self._try(what, name, problems) for name in some])  # type: ignore[misc]

        do(self._delete, names(WITHDRAW))
        if problems:
            return problems[0]
        do(lambda name: self._put(name, paths[name]), names(UPLOAD))
        if reason := self._look_for_later():  # while those were on their way
            return reason
        for name in names(COMPLETE):
            if not self._marks.is_doubtful(name, paths[name]) and self._marks.is_whole(name, paths[name]):
                do(lambda name: self._put(name, paths[name]), [name])
                if name in self._stored:
                    self.freshness.arrived(name)
        retired = names(RETIRE)
        if retired and not problems and self._marks.may_retire(succeeded) and not self._look_for_later():
            do(self._delete, retired)
            if self._in_parts:
                do(self._delete_below, [mark for mark in retired if mark not in self._stored])
        standing = [mark for mark in retired if mark in self._stored]
        do(
            self._delete,
            [
                name
                for name in names(REMOVE)
                if name in self._stored
                and not any(covers(mark, name) for mark in standing)
                and not (problems and name.startswith(OUTPUTS))  # under another name it may be what was not uploaded
            ],
        )
        return problems[0] if problems else ""

    def _delete_below(self, mark: str) -> None:
        """Delete what is left of a checkpoint in the store: the parts of other nodes."""
        folder = os.path.dirname(mark)
        for name in self._store.list(folder):
            self._delete(f"{folder}/{name}")

    def _try(self, what: Callable[[str], None], name: str, problems: list[str]) -> None:
        try:
            what(name)
        except FileNotFoundError:
            pass  # the script has removed it meanwhile
        except Exception as error:
            problems.append(str(error))

    def _look_for_later(self) -> str:
        """Return "" or that a later start of the run has claimed the output: nothing here is its business any more."""
        with self._claiming:
            later = epochs.newest(self._store) if self.epoch else 0
            if self.epoch and (moved := epochs.newest_on_sagemaker(self._store)) > self._attempt:
                self.replaced = f"attempt {moved} of this run has started on SageMaker"
            elif later > self.epoch:
                self.replaced = f"start {later} of this run writes to {self._store.uri}"
        return self.replaced and f"{self.replaced}, so this start ({self.epoch}) uploads nothing more there"

    def _put(self, name: str, path: str) -> None:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise store.Failed(f"{name!r} is not a valid name in an object store") from None
        before = state_of(path)
        try:
            self._store.put(path, name)
        except store.Failed as error:  # such as an object that is larger than the store takes
            raise store.Failed(f"{error} (the file {name})") from None
        after = state_of(path)
        if after == before or after is None:  # else it was written to meanwhile, and goes again
            self._stored[name] = before  # of one that is gone too, which the next pass then removes
        elif name.startswith(OUTPUTS):
            self._stored[name] = NOT_AS_HERE

    def _delete(self, name: str) -> None:
        self._store.delete(name)
        self._stored.pop(name, None)

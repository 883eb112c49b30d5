"""The attempts of one account and store: find them, look at them, close their leases. The handle is <attempt id>/<dseq>."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from cloudtrain.backends.akash.client import Console
from cloudtrain.backends.akash.control import Control
from cloudtrain.backends.akash.status import Seen, judge
from cloudtrain.backends.akash.submit import Submission, open_lease
from cloudtrain.backends.aws import Aws
from cloudtrain.backends.output_log import START, log_lines
from cloudtrain.backends.records import parse_record
from cloudtrain.backends.store.files import Files
from cloudtrain.backends.store.open import opened
from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.events import LogLine, State, Status

MOST_RECORD = 4 << 20  # bytes of a run.json
_HANDLE = re.compile(r"([a-z][a-z0-9-]*-a[1-9]\d{0,3})/(\d+)")


class Attempts:
    """Attempts that were submitted: the calls of a backend that the Console and the store answer. They raise BackendError."""

    follow_s: float | None = None

    def __init__(
        self, console: Console, aws: Aws, store: str, submission: Submission, *, lost_after_s: float, settle_s: float
    ) -> None:
        self._console, self._aws, self._store, self._submission = console, aws, store, submission
        self._lost_after_s, self._settle_s = lost_after_s, settle_s
        self._controls: dict[str, Control] = {}

    def control(self, attempt_id: str) -> Control:
        """Return the objects of an attempt, with what this process has read of them."""
        if attempt_id not in self._controls:
            self._controls[attempt_id] = Control(self._aws, self._store, attempt_id)
        return self._controls[attempt_id]

    def find(self, attempt_id: str) -> str | None:
        """Return the handle of an attempt that has a lease; None where another submission completes it, or it was never."""
        if lease := self.control(attempt_id).read("lease"):
            return f"{attempt_id}/{lease['dseq']}"
        return None

    def discard(self, attempt_id: str) -> None:
        """Close the deployment of an interrupted submission, which has no lease that is known here."""
        if found := self._submission.deployment(attempt_id):
            self._console.close(found[0])

    def lease(self, handle: str) -> Mapping[str, Any] | None:
        """Return what was stored with the lease of a handle, None where the handle is of no attempt."""
        attempt_id, dseq = parse_handle(handle)
        lease = self.control(attempt_id).read("lease")
        return lease if lease and lease["dseq"] == dseq else None

    def known_lease(self, handle: str, hint: str = "") -> Mapping[str, Any]:
        """Return what was stored with the lease of a handle; raises BackendError where nothing was."""
        if (lease := self.lease(handle)) is None:
            raise BackendError(f"the bucket of options.akash.store has no record of the lease {handle}", hint)
        return lease

    def labels(self, handle: str) -> dict[str, str]:
        return {str(name): str(value) for name, value in self.known_lease(handle)["labels"].items()}

    def files(self, lease: Mapping[str, Any]) -> Files:
        """Return the files of the run's output."""
        return opened(str(lease["output"]), self._aws)

    def status(self, handle: str) -> Status:
        """Return the attempt's status; a lease whose attempt has ended is closed here, for it would be billed on."""
        attempt_id, dseq = parse_handle(handle)
        control, lease = self.control(attempt_id), self.lease(handle)
        if lease is None:
            return Status(
                State.LOST,
                None,
                f"the bucket of options.akash.store has no record of the lease {handle}: "
                "it was deleted, or the option was changed",
            )
        if end := control.read("end"):
            return _status(end)
        names = control.names()
        seen = self._see(attempt_id, names, control, lease)
        status = judge(seen, lost_after_s=self._lost_after_s, settle_s=self._settle_s)
        if "given" in names and (status.state is State.RUNNING or status.state.final):
            control.delete("given")  # every container has the secrets by now, or needs them no more
        if not status.state.final:
            return status
        if seen.open:
            try:
                self._console.close(dseq)
            except BackendError as error:
                reason = f"ended {status.state}, but its lease is still billed: {error.message}"
                return Status(State.STOPPING, None, reason[:300], status.started_at, url=status.url)
        control.create("end", {**asdict(status), "state": str(status.state)})
        return _status(control.read("end"))

    def cancel(self, handle: str) -> None:
        """Close the deployment with its lease; the containers get SIGTERM. Does nothing for an attempt that has ended."""
        attempt_id, dseq = parse_handle(handle)
        control = self.control(attempt_id)
        if self.lease(handle) is None or control.read("end"):
            return
        status = self.status(handle)
        if status.state.final:
            return
        control.create("cancel", {"at": self._console.now()})
        try:
            self._console.close(dseq)
        except BackendError as error:
            kind = Unreachable if isinstance(error, Unreachable) else BackendError
            hint = "until it is closed the lease is billed: cancel again, or close it at console.akash.network"
            raise kind(f"Akash has not confirmed that the job ended: {error.message}", hint) from None

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        """Yield the log lines of all nodes behind a cursor, from the run's output; with `follow` until the attempt has ended.

        The log of a provider has neither times nor a cursor.
        """
        attempt_id, _ = parse_handle(handle)
        if (lease := self.lease(handle)) is None:
            return
        files = self.files(lease)
        while True:
            # Asked before the log is read: what was written until then is read below.
            final = not follow or self.status(handle).state.final
            for line in log_lines(files, f"logs/{attempt_id}", after):
                after = line.cursor
                yield line
            if final:
                return
            self._console.clock.sleep(self.follow_s or 0.0)

    def _see(self, attempt_id: str, names: list[str], control: Control, lease: Mapping[str, Any]) -> Seen:
        deployment = self._console.deployment(str(lease["dseq"]))
        cancelled = control.read("cancel") if "cancel" in names else None
        reports = {
            int(name.removeprefix("end-")): report
            for name in names
            if re.fullmatch(r"end-\d{1,5}", name) and isinstance(report := control.read(name), dict)
        }
        record = self._record(attempt_id, lease)
        still_open = deployment is not None and open_lease(deployment) is not None
        ending = None
        if not still_open or cancelled or reports or record.get("final"):
            if "ending" not in names:
                control.create("ending", {"at": self._console.now()})
            ending = control.read("ending")
        return Seen(
            now=self._console.now(),
            lease=lease,
            deployment=deployment,
            record=record,
            reports=reports,
            began=any(name.startswith("began-") for name in names),
            cancelled=cancelled is not None,
            ending_at=float(ending["at"]) if ending else None,
        )

    def _record(self, attempt_id: str, lease: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the newest record of the attempt in the run's output, {} before there is one."""
        files, folder = self.files(lease), f"history/{attempt_id}"
        starts = sorted(name for name in files.sizes(folder) if re.fullmatch(rf"{START}/run\.json", name))
        if not starts:
            return {}
        run_id, _, number = attempt_id.rpartition("-a")
        return parse_record(files.read(f"{folder}/{starts[-1]}", MOST_RECORD), run_id, int(number)) or {}


def parse_handle(handle: str) -> tuple[str, str]:
    """Return attempt id and dseq of a handle; raises BackendError for another text."""
    match = _HANDLE.fullmatch(handle)
    if match is None:
        raise BackendError(f"{handle!r} is not an Akash lease of cloudtrain", "<attempt id>/<dseq>")
    return match[1], match[2]


def _status(end: Mapping[str, Any]) -> Status:
    return Status(**{**end, "state": State[str(end["state"])]})

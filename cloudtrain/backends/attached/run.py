"""Read a run from its output folder: attempts, states, logs and provenance, as entrypoints/launcher/output/history.py wrote them.

Whoever can write there can have written anything, so that nothing is believed: names and sizes are bounded here, and
records.py checks what the files hold. `cloudtrain resume` gives its job and source to a platform, and nothing else does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from cloudtrain.backends.checkpoints import HISTORIES, name_here
from cloudtrain.backends.output_log import START, log_lines
from cloudtrain.backends.plan import AttachedAttempt
from cloudtrain.backends.records import build_attempt, parse_newest, parse_record
from cloudtrain.backends.store.files import Files, NotRead, Objects, report
from cloudtrain.backends.store.open import opened
from cloudtrain.errors import BadRequest
from cloudtrain.events import LogLine

MOST_RECORD = 4 << 20  # bytes of a run.json
MOST_SOURCE = 512 << 20  # bytes of a packed source
RUN_ID = re.compile(r"[a-z][a-z0-9-]{0,80}")
_RECORD = re.compile(rf"([a-z][a-z0-9-]{{0,80}})-a([1-9]\d{{0,3}})/({START})/run\.json")


def run_names(files: Files) -> list[str]:
    """Return the names of the runs below a team's output, unsorted; blocking. Raises BackendError."""
    return [name for name in files.folders() if RUN_ID.fullmatch(name)]


def newest_attempt(files: Files, run_id: str) -> AttachedAttempt | None:
    """Return the newest attempt of a run below an output, as its run.json has it, in one to three reads; None without one.

    Raises NotRead, where one is not read and there is no other.
    """
    refused = None
    for base in HISTORIES:
        try:
            data = files.read(f"{run_id}/{base}run.json", MOST_RECORD)
        except NotRead as error:
            refused = refused or error
            continue
        if data is not None and (attempt := attempt_of(files, run_id, data)):
            return attempt
    if refused:
        raise refused
    return None


def attempt_of(files: Files, run_id: str, data: bytes) -> AttachedAttempt | None:
    """Return the attempt of a run's newest record; None for a record that is none of this run."""
    found = parse_newest(data, run_id)
    if found is None:
        return None
    record, number = found
    start, uri = str(record.get("start") or ""), f"{files.uri}/{run_id}"
    return build_attempt(record, run_id, number, start, uri, superseded=False)


class AttachedRun:
    """The history of one run at a URI. Every call blocks; raises BackendError, BadRequest."""

    def __init__(self, uri: str) -> None:
        self.files: Files = opened(uri.removesuffix("/run.json"), may_be_link=False)
        self.uri = self.files.uri
        self._bases: dict[str, str] = {}  # attempt id -> one of HISTORIES; another one than "" is SageMaker's

    def attempts(self) -> list[AttachedAttempt]:
        """Return the run's attempts, the oldest first; raises BadRequest where there is no history."""
        newest: dict[int, tuple[str, str, str]] = {}
        first: dict[int, str] = {}
        run_ids = set()
        refused: list[NotRead] = []
        for base in HISTORIES:  # a run that moved has more than one
            if newest and base == HISTORIES[-1]:
                break
            try:
                names = self.files.sizes(f"{base}history")
            except NotRead as error:
                refused.append(error)
                continue
            for name in names:
                if match := _RECORD.fullmatch(name):
                    run_ids.add(match[1])
                    number = int(match[2])
                    newest[number] = max(newest.get(number, ("", "", "")), (match[3], name, base))
                    first[number] = min(first.get(number, match[3]), match[3])
        if not newest and refused:
            raise refused[0]
        if not newest:
            hint = "give the run's own folder, <output>/<run id>. It has a history only when the job sets `output`"
            raise BadRequest(f"no run history found at {self.uri}", hint)
        if len(run_ids) > 1:
            raise BadRequest(f"{self.uri} has the history of more than one run: {', '.join(sorted(run_ids)[:3])}")
        refused.clear()  # a folder of checkpoints may be a link: they are not read here
        (run_id,) = run_ids
        attempts = []
        for number in sorted(newest):
            _, name, base = newest[number]
            self._bases[f"{run_id}-a{number}"] = base
            try:
                record = parse_record(self.files.read(f"{base}history/{name}", MOST_RECORD), run_id, number)
            except NotRead as error:
                refused.append(error)
                continue
            if record is not None:
                superseded = number < max(newest)
                attempts.append(build_attempt(record, run_id, number, first[number], self.uri, superseded))
        if not attempts and refused:
            raise refused[-1]
        for each in refused:
            report(each)
        if not attempts:
            raise BadRequest(f"the files at {self.uri} are not a run history that this version of cloudtrain can read")
        return attempts

    def lines(self, attempt_id: str, after: str | None = None) -> Iterator[LogLine]:
        """Yield the lines of all nodes behind a cursor, by time, in order on each node."""
        return log_lines(self.files, f"{self._bases.get(attempt_id, '')}logs/{attempt_id}", after)

    def output_sizes(self) -> dict[str, int]:
        """Return name -> bytes of the files in the run's outputs."""
        return self.files.sizes("outputs")

    def read_output(self, name: str, most: int) -> bytes | None:
        """Return a file of the run's outputs, None where it is gone; raises NotRead."""
        return self.files.read(f"outputs/{name}", most)

    def source(self, digest: str) -> bytes | None:
        """Return the packed source of that digest, None where there is none."""
        name = f"source/{digest}.tar.gz"
        found = (self.files.read(base + name, MOST_SOURCE) for base in HISTORIES)
        return next((data for data in found if data is not None), None) if digest.isalnum() else None

    def bring(self, attempt_id: str, into: Path, what: tuple[str, ...]) -> None:
        """Copy the run's folders below a folder."""
        into.mkdir(parents=True, exist_ok=True)
        for name in what:
            moved = name == "checkpoints" and any(self._bases.values())
            self.files.bring(name, into / name, name_here if moved else str)
        if self._bases.get(attempt_id) and isinstance(self.files, Objects):
            # Packed by SageMaker itself
            for name, archive in (("model", "model.tar.gz"), ("outputs", "output.tar.gz")):
                if name in what:
                    self.files.bring_archive(f"{attempt_id}/output/{archive}", into / name)

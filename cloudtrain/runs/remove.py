"""Delete what ended runs have left: on their platforms and hosts, in this home, and in the history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cloudtrain.backends.api import HasRemoval
from cloudtrain.errors import BadRequest, DiskError
from cloudtrain.history import audit
from cloudtrain.nodes import removal
from cloudtrain.runs import output_audit, run_inputs
from cloudtrain.runs.attempts import backend_of
from cloudtrain.runs.run import Run

FOLDERS = ("runs", run_inputs.FOLDER)  # of the home, which have one of a run's name


@dataclass(frozen=True)
class Remains:
    """What a run has left: place -> bytes (None where they are not known), and the output that stays."""

    run_id: str
    places: Mapping[str, int | None]
    kept: str = ""


def find_remains(run: Run, *, here: bool = False) -> Remains:
    """Return what `remove` deletes of a run; blocking. `here`: only on this machine.

    Raises:
        BadRequest: the run is live.
        BackendError: its platform does not answer.
    """
    if not (run.record.status.state.final or run.refresh().state.final):
        raise BadRequest(
            f"{run.run_id} is still {run.record.status.state}: only ended runs can be removed",
            f"cloudtrain cancel {run.run_id} ends it first",
        )
    places: dict[str, int | None] = {}
    for handle, backend in () if here else _removable(run):
        places |= backend.remains(handle)
    for folder in (run.store.home / name / run.run_id for name in FOLDERS):
        if (size := removal.measure(folder)) is not None:
            places[str(folder)] = size
    places[f"{run.store.database.path}, its rows"] = None
    return Remains(run.run_id, places, "" if run.record.attached else str(run.record.job.get("output") or ""))


def remove(run: Run, *, here: bool = False) -> None:
    """Delete a run that has ended; blocking, and repeated after an interruption it deletes the rest.

    Its rows go last, so that what is left can still be found. Raises BadRequest, BackendError and DiskError.
    """
    find_remains(run, here=True)  # raises where it is live
    record = run.record
    row = audit.append(
        run.store.home, "rm", run.run_id, target=record.target or record.backend, detail="here" if here else ""
    )
    with output_audit.copied(run.store.home, {} if record.attached else record.job, row):
        for handle, backend in () if here else _removable(run):
            backend.remove(handle)
    try:
        for name in FOLDERS:
            removal.remove_run(run.store.home / name, run.run_id, stops=False)
    except OSError as error:
        raise DiskError(error.filename or run.store.home, error) from None
    if not run.store.delete(run.run_id):
        raise BadRequest(f"{run.run_id} was resumed in the meantime")


def _removable(run: Run) -> Iterator[tuple[str, HasRemoval]]:
    """Yield each attempt's handle and its backend, where that can delete; of an attached run nothing is deleted."""
    for attempt in () if run.record.attached else run.attempts:
        if attempt.handle is not None:
            backend = backend_of(attempt.plan, run.store.home, attempt.handle)
            if isinstance(backend, HasRemoval):
                yield attempt.handle, backend

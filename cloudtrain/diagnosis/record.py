"""Store a run's verdict in the history: it is judged once, when the run has ended, and read from there by every view."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from cloudtrain.backends import registry
from cloudtrain.backends.plan import ATTACHED
from cloudtrain.diagnosis.judge import judge, state_reason
from cloudtrain.diagnosis.verdict import End, Verdict
from cloudtrain.errors import CloudtrainError
from cloudtrain.events import ESCAPE, Event, LogLine, Status
from cloudtrain.history.records import AttemptRecord
from cloudtrain.history.store import Store
from cloudtrain.job.units import now
from cloudtrain.source import secrets
from cloudtrain.source.files import list_files

NODE = -1  # the node of the verdict's event: nodes have numbers from 0, so no job can write such an event
KIND = "verdict"
Complete = Callable[[Store, AttemptRecord, Status, Verdict], Verdict]


def load_verdict(store: Store, attempt: AttemptRecord) -> Verdict | None:
    """Return the verdict that is stored in the history, or None."""
    event = store.latest(attempt.attempt_id, NODE, KIND)
    try:
        return Verdict.from_dict(event.data) if event else None
    except TypeError:
        return None  # of a version with other fields


def judge_attempt(
    store: Store, attempt: AttemptRecord, status: Status, lines: Iterable[LogLine], complete: Complete | None = None
) -> Verdict:
    """Judge how an attempt ended, store the verdict and return it; of two at once the first is stored.

    `complete` adds to its advice what the history knows of the run.
    """
    results = [event.data for event in store.events(attempt.run_id, "result") if event.attempt == attempt.attempt_id]
    with_rank = (result for result in results if isinstance(result.get("failed_rank"), int))
    result = next(with_rank, results[0] if results else None)
    verdict = judge(End.from_status(status, result), lines)
    if attempt.handle is None and verdict.label in (
        "unknown",
        "network",
    ):  # never sent: its reason is all that is known
        verdict = state_reason(status.reason)
    verdict = replace(verdict, deciding=clean_line(verdict.deciding), raised=clean_line(verdict.raised))
    if verdict.label == "missing-file" and (sentence := _not_sent(attempt, verdict.deciding)):
        verdict = replace(verdict, change=sentence)
    elif verdict.label == "missing-module" and (sentence := _not_on_path(attempt, verdict.deciding)):
        verdict = replace(verdict, what="a module of the source is not on Python's path", change=sentence)
    elif change := registry.traits(attempt.plan.backend).fixes.get(verdict.label):
        verdict = replace(verdict, change=change)
    if complete:
        verdict = complete(store, attempt, status, verdict)
    event = Event(attempt.attempt_id, NODE, 0, status.ended_at or now(), KIND, verdict.to_dict())
    if not store.database.read_only:
        store.record(attempt.attempt_id, events=[event])
    return verdict


def _not_sent(attempt: AttemptRecord, line: str) -> str:
    """Return why a missing file that is in the source's folder was not sent; "" where it is not there."""
    from cloudtrain.source import texts

    root, sent = _source(attempt)
    quoted = re.search(r"""['"]([^'"]+)['"]\s*$""", line)
    name = quoted[1] if quoted else line.rpartition(" ")[2]
    _, inside, below = name.rpartition("/source/")  # the script's folder on the node
    return texts.explain(root, sent, below if inside else name) if root else ""


def _not_on_path(attempt: AttemptRecord, line: str) -> str:
    """Return how Python finds a module that the source has; "" where it has none of that name."""
    found = re.search(r"No module named '?(\w+)'?$", line)
    _, sent = _source(attempt)
    places = [
        path
        for path in sent
        if found
        and (path == f"{found[1]}.py" or f"/{path}".endswith(f"/{found[1]}.py") or f"/{found[1]}/" in f"/{path}")
    ]
    if not found or not places:
        return ""
    nearest = min(places, key=lambda path: (path.count("/"), path))
    folder = f"/{nearest}".partition(f"/{found[1]}{'.py' if nearest.endswith(f'{found[1]}.py') else '/'}")[0].strip("/")
    entry = str(attempt.plan.job.get("entrypoint") or "")
    module = entry.removesuffix(".py").replace("/", ".")
    start = f"start the script with entrypoint: -m {module}, or " * (
        not folder and entry.endswith(".py") and "/" in entry
    )
    return f"{nearest} is in the source: {start}set PYTHONPATH: {folder or '.'} in env"


def _source(attempt: AttemptRecord) -> tuple[Path | None, list[str]]:
    """Return the folder that an attempt's source was taken from, and what is packaged of it; nothing where it is gone."""
    root = Path(str(attempt.plan.job.get("source") or ""))
    if (attempt.handle or "").startswith(ATTACHED):
        return None, []  # its job is another person's word: no folder is read because of it
    if not root.is_absolute() or not root.is_dir():
        return None, []
    try:
        return root, [file.path for file in list_files(root)]
    except CloudtrainError:
        return None, []


def clean_line(text: str) -> str:
    """Return a job's line without terminal control characters; a line with a credential is replaced."""
    if secrets.search(text.encode("utf-8", "replace")):
        return "(line hidden: it seems to contain a credential)"
    return "".join(letter for letter in ESCAPE.sub("", text).replace("\t", " ") if letter.isprintable())

"""Check the records of an attached run (run.json) and make attempts of them: what does not fit is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cloudtrain.backends.checkpoints import FOLDERS
from cloudtrain.backends.plan import AttachedAttempt, Plan
from cloudtrain.errors import BackendError, CloudtrainError, upgrade_command
from cloudtrain.events import State, Status, is_shallow
from cloudtrain.job.units import format_time, now, seconds_since

VERSION = 1
MOST_TEXT = 64 << 10  # characters of a text
SILENT_S = 3600.0  # without a word for so long it is taken for lost
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z")
_WORD = re.compile(r"[a-z][a-z0-9-]{0,62}")
_ID = re.compile(r"-(\d{6})-(\d{6})-")  # in a run's id: when it was made


def parse_record(data: bytes | None, run_id: str, number: int) -> dict[str, Any] | None:
    """Return a run.json that is one, of this run and attempt; raises BackendError for one of a newer cloudtrain."""
    try:
        record = json.loads(data or b"null")
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not is_shallow(record):
        return None
    if isinstance(record.get("version"), int) and record["version"] > VERSION:
        raise BackendError(f"the history of {run_id} was written by a newer cloudtrain", upgrade_command())
    if (record.get("version"), record.get("run_id"), record.get("attempt")) != (VERSION, run_id, number):
        return None
    cleaned: dict[str, Any] = _clean(record)
    return cleaned


def parse_newest(data: bytes, run_id: str) -> tuple[dict[str, Any], int] | None:
    """Return the record of a run's own run.json and the number of its attempt; None for one that is none of this run."""
    try:
        number = json.loads(data).get("attempt")
    except (ValueError, RecursionError, AttributeError):
        return None
    if not isinstance(number, int) or isinstance(number, bool) or not 0 < number < 10_000:
        return None
    record = parse_record(data, run_id, number)
    return None if record is None else (record, number)


def build_attempt(
    record: Mapping[str, Any], run_id: str, number: int, start: str, uri: str, superseded: bool
) -> AttachedAttempt:
    """Return the attempt that a record is of; `superseded` where a later attempt exists."""
    about = _mapping(record.get("about"))
    job = _job(about.get("job"), run_id)
    orders, bundle = _mapping(record.get("manifest")), _mapping(about.get("bundle"))
    argv, checkpoint = orders.get("argv"), _mapping(orders.get("checkpoint"))
    plan = Plan(
        backend=_word(about.get("backend")) or _word(record.get("platform")) or "attached",
        run_id=run_id,
        attempt=number,
        request={},
        bundle={
            "sha256": str(bundle.get("sha256") or "")[:64],
            "source_sha256": str(bundle.get("source_sha256") or "")[:64],
            "size_bytes": _count(bundle.get("size_bytes"), 0),
            "files": _count(bundle.get("files"), 0),
            "commit": str(bundle["commit"])[:64] if bundle.get("commit") else None,
            "dirty": bundle.get("dirty") is True,
        },
        manifest={
            "run_id": run_id,
            "attempt": number,
            "argv": [argument for argument in argv if isinstance(argument, str)] if isinstance(argv, list) else [],
            "nodes": _count(orders.get("nodes"), 1),
            "processes_per_node": _count(orders.get("processes_per_node"), 1),
            "gpus_per_node": _count(orders.get("gpus_per_node"), 0),
            "max_runtime_s": _count(orders.get("max_runtime_s"), 0),
            "secrets": {},
            "output": uri.removesuffix(f"/{run_id}") if uri.endswith(f"/{run_id}") else None,
            "checkpoint": {"folder": folder if (folder := checkpoint.get("folder")) in FOLDERS else None},
        },
        job=job,
        target=_word(job.get("target")),
    )
    patch, left_out = about.get("patch"), about.get("left_out")
    origin = {
        "source": str(job.get("source") or ""),
        "bundle": plan.bundle["sha256"],
        "source_sha256": plan.bundle["source_sha256"],
        "commit": plan.bundle["commit"],
        "dirty": plan.bundle["dirty"],
        "text": patch if isinstance(patch, str) else "",
        "left_out": [text for text in left_out if isinstance(text, str)] if isinstance(left_out, list) else [],
        "attached": uri,
    }
    return AttachedAttempt(uri, plan, _status(record, uri, superseded), _created(run_id, number, start), origin)


def _status(record: Mapping[str, Any], uri: str, superseded: bool) -> Status:
    name = record.get("state")
    state = State(name) if isinstance(name, str) and name in State.__members__ else State.STARTING
    code, reason = record.get("exit_code"), record.get("reason")
    started, ended = _moment(record.get("started_at")), _moment(record.get("ended_at"))
    reported = Status(
        state,
        code if isinstance(code, int) and not isinstance(code, bool) and -1 < code < 256 else None,
        reason[:1000] if isinstance(reason, str) else "",
        started,
        ended if state.final else None,
    )
    last_report = _moment(record.get("updated_at"))
    if state.final:
        return reported
    if superseded:
        return Status(State.LOST, None, "another attempt has started since", started, last_report)
    since = seconds_since(last_report) if last_report else 0.0
    if since > SILENT_S:
        return Status(
            State.LOST, None, f"its launcher wrote to {uri} for the last time at {last_report}", started, last_report
        )
    return reported


def _job(data: object, run_id: str) -> dict[str, Any]:
    """Return a job that is one, else only a name: what it names is shown, and never submitted."""
    from cloudtrain.job.job import Job

    if isinstance(data, dict):
        try:
            job = Job.from_dict(data).to_dict()
            patterns = job.get("metrics") or {}
            return {**job, "metrics": {name: text for name, text in patterns.items() if _is_simple(text)}}
        except (CloudtrainError, ValueError, TypeError):
            pass
    return {"name": _ID.split(run_id)[0]}


def _is_simple(pattern: str) -> bool:
    """Return whether a regular expression cannot take for ever: nothing in it is repeated that repeats or chooses itself."""
    if len(pattern) > 300:
        return False
    repeats = len(re.findall(r"(?<!\\)[*+{]", re.sub(r"\[[^\]]*\]", "x", pattern)))
    return repeats <= 3 and not re.search(r"\)[*+{?]|\(\?[=!<]|\\[1-9]|\(\?P=", pattern)


def _created(run_id: str, number: int, start: str) -> str:
    """Return when an attempt was made: the first one's moment is in the run's id, a start's in its own name."""
    match = _ID.search(run_id) if number == 1 else None
    text, form = (f"{match[1]}{match[2]}", "%y%m%d%H%M%S") if match else (start[:22], "%Y%m%dT%H%M%S.%f")
    try:
        return format_time(datetime.strptime(text, form).replace(tzinfo=UTC))
    except ValueError:
        return now()


def _clean(value: Any) -> Any:
    """Return plain data without what a terminal would obey, and without numbers that no field of ours can have."""
    if isinstance(value, str):
        text = value[:MOST_TEXT]
        return text if text.isprintable() else "".join(c for c in text if c.isprintable() or c in "\n\t")
    if isinstance(value, dict):
        return {_clean(name): _clean(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    return 0 if isinstance(value, int) and abs(value) >= 1 << 53 else value


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _word(value: object) -> str:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else ""


def _count(value: object, default: int) -> int:
    return (
        int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12 else default
    )


def _moment(value: object) -> str | None:
    if not (isinstance(value, str) and _MOMENT.fullmatch(value)):
        return None
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return None
    return value

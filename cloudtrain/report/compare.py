"""What two runs differ in: their job, hyperparameters, native request, source, installed packages and results."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import images
from cloudtrain.history import table
from cloudtrain.job.units import format_number
from cloudtrain.report.packages import requirements

if TYPE_CHECKING:
    from cloudtrain.history.store import Store

SECTIONS = ("spec", "hyperparameters", "request", "source", "requirements", "results")
_ELSEWHERE = ("hyperparameters", "args", "name", "source", "labels")  # told in another section, or of no account
_PIECES = ("CLOUDTRAIN_MANIFEST_", "ct_manifest_")  # the job once more, packed
_DIGESTS = ("label.job-digest", "label.source-digest")  # labels that cloudtrain itself gives a run with a key
_OF_SWEEP = ("label.sweep", "label.trial")  # and a trial of a sweep
_OWN_ENV = "SWEEP_TRIAL"  # a trial's parameters once more
MOST_PARTS = 4  # of a run's name by what differs
LONGEST_PART = 40  # characters
_ABSENT = object()
_UNKNOWN = ("requirements",)  # sections of which a run may have nothing, because nothing was reported


@dataclass(frozen=True)
class Difference:
    """One value that differs; None where a run has no such value."""

    section: str
    path: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Row:
    """One value in which some runs differ, of each of them; None where a run has no such value."""

    section: str
    path: str
    values: tuple[Any, ...]


def between(store: Store, first: str, second: str) -> list[Difference]:
    """Return the differences of two runs, section by section; a value that only names its run counts as equal."""
    return [Difference(row.section, row.path, *row.values) for row in among(store, [first, second])]


def among(store: Store, run_ids: Sequence[str]) -> list[Row]:
    """Return the values in which runs differ, section by section, as `between` does for two."""
    rows = []
    for section, *sides in zip(SECTIONS, *(_sides(store, run_id) for run_id in run_ids), strict=True):
        if section in _UNKNOWN and not all(sides):
            continue
        for path in dict.fromkeys(path for side in sides for path in side):
            values = [side.get(path, _ABSENT) for side in sides]
            if any(value != values[0] for value in values):
                rows.append(Row(section, path, tuple(None if value is _ABSENT else value for value in values)))
    return rows


def describe_runs(store: Store, run_ids: Sequence[str]) -> dict[str, str]:
    """Return a name for each run: its title, else what its hyperparameters and labels differ in (`lr 1e-3, bs 64`)."""
    rows = table.rows_of(store, run_ids, ["title"])
    every = table.values_of(store, run_ids)
    own = (*_DIGESTS, *(_OF_SWEEP if "label.sweep" in every else ()))
    values = {
        name.partition(".")[2]: of
        for name, of in every.items()
        if name not in own and (len(set(of.values())) > 1 or len(of) < len(run_ids))
    }
    names = {}
    for row in rows:
        run_id, parts = row.record.run_id, []
        for name, of in values.items():
            if run_id in of:
                parts.append(f"{name} {_as_written(of[run_id])}"[:LONGEST_PART])
        names[run_id] = str(row.values[0] or ", ".join(parts[:MOST_PARTS]) or run_id)
    counts = Counter(names.values())
    return {run_id: name if counts[name] == 1 else f"{name} ({run_id[-4:]})" for run_id, name in names.items()}


def _as_written(value: str) -> str:
    """Return a value with a fraction or an exponent as people write it: 2.7e-4 for 0.00027."""
    if value.isdigit():
        return value  # a seed or an id keeps all of its digits
    try:
        return format_number(float(value))
    except ValueError:
        return value


def diff_patches(store: Store, first: str, second: str) -> str:
    """Return a unified diff of two runs' patches; empty where they are the same."""
    old, new = (str(store.provenance(run_id).get("text") or "") for run_id in (first, second))
    lines = unified_diff(old.splitlines(), new.splitlines(), first, second, lineterm="", n=1)
    return "\n".join(lines)


def _sides(store: Store, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the values of every section by their path."""
    record, attempts = store.find(run_id), store.attempts(run_id)
    job = record.job
    plan = attempts[-1].plan
    yield {
        path: value
        for path, value in _leaves({key: value for key, value in job.items() if key not in _ELSEWHERE})
        if path != f"env.{_OWN_ENV}"
    }
    hyperparameters = dict(job.get("hyperparameters") or {})
    yield dict(_leaves(hyperparameters)) | _by_flag([str(word) for word in job.get("args") or ()])
    yield {path: _named(value, run_id) for path, value in _leaves(plan.request) if not _packed(path)}
    origin = store.provenance(run_id)
    patch = str(origin.get("text") or "")
    yield {
        "folder": job.get("source"),
        "commit": plan.bundle.get("commit"),
        "dirty": bool(plan.bundle.get("dirty")),
        "source_sha256": plan.bundle.get("source_sha256"),
        "patch": f"{len(patch.splitlines())} lines, sha256 {_digest(patch)}" if patch else None,
        "not included in the patch": list(origin.get("left_out") or ()) or None,
        "image": "\n".join(
            images.describe_images({node: images.digest_of(image) for node, image in attempts[-1].images.items()})
        )
        or None,
        "cloudtrain": (origin.get("client") or {}).get("cloudtrain"),
    }
    yield dict(line.split("==", 1) for line in requirements(store.events(run_id, "requirements")))
    status = record.status
    results = {
        "state": status.state.value,
        "exit_code": status.exit_code,
        "reason": _named(status.reason, run_id) or None,
        "attempts": len(attempts),
    }
    last = {row.name: row.last for row in store.curves.summary(run_id)}
    shown = {name: value if math.isfinite(value) else str(value) for name, value in last.items()}  # JSON has no NaN
    yield results | beside(results, shown)


def describe_packages(store: Store, first: str, second: str) -> str:
    """Return that the installed packages of two runs are the same, or not known; "" where they differ."""
    known = {run_id: requirements(store.events(run_id, "requirements")) for run_id in (first, second)}
    if missing := [run_id for run_id, lines in known.items() if not lines]:
        return f"packages: not reported by {' and '.join(missing)}"
    return f"packages: the same ({len(known[first])})" if sorted(known[first]) == sorted(known[second]) else ""


def _by_flag(words: Sequence[str]) -> dict[str, Any]:
    """Return a script's arguments by their flags (`--lr`), and those before the first flag as `args`."""
    found: dict[str, list[str]] = {}
    flag = "args"
    for word in words:
        if word.startswith("--") and len(word) > len("--"):
            flag, is_given, value = word.partition("=")
            found.setdefault(flag, []).extend([value] if is_given else [])
        else:
            found.setdefault(flag, []).append(word)
    return {
        flag: values if flag == "args" or len(values) > 1 else values[0] if values else True
        for flag, values in found.items()
    }


def beside(results: Container[str], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics by the names that they have beside a run's results: `metrics.state` where that is a result too."""
    return {f"metrics.{name}" if name in results else name: value for name, value in metrics.items()}


def flatten(value: Any) -> dict[str, Any]:
    """Return the values of some JSON by their paths, without the pieces that hold a packed job."""
    return {path: leaf for path, leaf in _leaves(value) if not _packed(path)}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of everything in some JSON that is not a mapping; lists of plain values stay whole."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{number}]")
    elif value is not None and value != [] and value != "":
        yield path, list(value) if isinstance(value, tuple) else value


def _packed(path: str) -> bool:
    name = path.rpartition(".")[2]
    return name.startswith(_PIECES) or name == _OWN_ENV


def _named(value: Any, run_id: str) -> Any:
    """Return a value in which the run's own id is a placeholder."""
    return json.loads(json.dumps(value).replace(run_id, "${run_id}"))


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]

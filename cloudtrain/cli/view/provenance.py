"""Print the provenance of a run: commit, patch, the machine that submitted it, the machines it ran on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import images
from cloudtrain.cli.view import terminal
from cloudtrain.job.targets import submitter
from cloudtrain.job.units import format_count
from cloudtrain.report.packages import requirements
from cloudtrain.runs.planning.upstream import describe_input

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run

MAX_SENTENCES = 5  # about files that were not included in the patch


def print_provenance(run: Run) -> None:
    """Print a run's provenance; nothing for a run that an older cloudtrain submitted."""
    origin = run.store.provenance(run.run_id)
    if not origin:
        return
    inputs = run.record.job.get("inputs") or {}
    client: Mapping[str, Any] = origin.get("client") or {}
    terminal.print_lines("", "provenance")
    terminal.print_pairs(
        [
            ("commit", _commit(origin)),
            ("patch", _patch(origin, run.run_id)),
            ("left out", _left_out(origin)),
            *((f"input {name}", describe_input(item)) for name, item in inputs.items() if "run" in item),
            ("bundle", f"sha256 {str(origin.get('bundle'))[:16]}"),
            ("submitted", f"on {client.get('host')}, {client.get('system')}" if client else _submitter(run)),
            ("by", f"cloudtrain {client.get('cloudtrain')}, Python {client.get('python')}" if client else ""),
            ("image", "\n".join(images.describe_images(run.attempts[-1].images))),
            ("packages", _packages(run)),
            *((("ran on" if not number else ""), text) for number, text in enumerate(_machines(run))),
        ]
    )


def print_patch(run: Run) -> int:
    """Print the patch of the submitted tree, byte for byte. Return 1 when there is none."""
    origin = run.store.provenance(run.run_id)
    text = str(origin.get("text") or "")
    for sentence in origin.get("left_out") or ():
        terminal.note(f"not included: {sentence}")
    if not text:
        why = "had no changes" if origin.get("commit") and not origin.get("dirty") else "has stored no patch"
        terminal.note(f"{run.run_id} {why}")
        return 0 if origin.get("commit") and not origin.get("dirty") else 1
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()
    return 0


def print_requirements(run: Run) -> int:
    """Print the packages of a run's ranks in the format of `pip freeze`. Return 1 when none were reported."""
    packages = requirements(run.store.events(run.run_id, "requirements"))
    terminal.print_lines(*packages) if packages else terminal.note(f"{run.run_id} has reported no packages")
    return 0 if packages else 1


def _packages(run: Run) -> str:
    packages = requirements(run.store.events(run.run_id, "requirements"))
    return f"{len(packages)} (cloudtrain show {run.run_id} --requirements)" if packages else ""


def _submitter(run: Run) -> str:
    """Return who submitted an attached run, from the labels of its job. The machine is not recorded there."""
    user = submitter(run.record.job.get("labels") or {})
    return f"by {user}" if user else ""


def _commit(origin: Mapping[str, Any]) -> str:
    if not origin.get("commit"):
        return "none: the source is not in a git repository"
    return f"{origin['commit']}{' with changes' if origin.get('dirty') else ''}"


def _patch(origin: Mapping[str, Any], run_id: str) -> str:
    text = str(origin.get("text") or "")
    if not text:
        return ""
    files = sum(line.startswith("diff --git ") for line in text.splitlines())
    counts = f"{format_count(files, 'file')}, {format_count(len(text.splitlines()), 'line')}"
    return f"{counts} (cloudtrain show {run_id} --patch)"


def _left_out(origin: Mapping[str, Any]) -> str:
    sentences = list(origin.get("left_out") or ())
    rest = [f"and {len(sentences) - MAX_SENTENCES} more"] if len(sentences) > MAX_SENTENCES else []
    return "\n".join([*sentences[:MAX_SENTENCES], *rest])


def _machines(run: Run) -> list[str]:
    """Return a line for every node of the newest attempt: what its launcher and trainer reported in `world` events."""
    newest = run.attempts[-1].attempt_id
    nodes: dict[int, dict[str, Any]] = {}
    for event in run.store.events(run.run_id, "world"):
        if event.attempt == newest:
            nodes.setdefault(event.node, {}).update(event.data)
    lines = []
    for node, facts in sorted(nodes.items()):
        versions = facts.get("versions")
        parts = [str(facts["hostname"])] if facts.get("hostname") else []
        parts += [f"Python {facts['python']}"] if facts.get("python") else []
        parts += [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
        parts += [f"{facts['gpus']} GPU{'s' * (facts['gpus'] != 1)}"] if facts.get("gpus") else []
        parts += [str(facts["device"])] if facts.get("device") else []
        lines.append(f"node {node}: {', '.join(parts)}")
    return lines[:8] + ([f"and {format_count(len(lines) - 8, 'more node')}"] if len(lines) > 8 else [])

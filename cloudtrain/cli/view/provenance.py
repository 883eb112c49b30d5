"""Where a run came from, as `show` tells it: commit and patch, the machine that submitted it, what it ran on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import images
from cloudtrain.cli.view import terminal
from cloudtrain.report.packages import requirements

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run

SHOWN = 5  # names of files


def tell(run: Run) -> None:
    """Print a run's provenance; nothing for a run of an older cloudtrain."""
    origin = run.store.provenance(run.run_id)
    if not origin:
        return
    client: Mapping[str, Any] = origin.get("client") or {}
    terminal.say("", "provenance")
    terminal.pairs(
        [
            ("commit", _commit(origin)),
            ("patch", _patch(origin, run.run_id)),
            ("left out", _left_out(origin)),
            ("bundle", f"sha256 {str(origin.get('bundle'))[:16]}"),
            ("submitted", f"on {client.get('host')}, {client.get('system')}" if client else _submitter(run)),
            ("by", f"cloudtrain {client.get('cloudtrain')}, Python {client.get('python')}" if client else ""),
            ("image", "\n".join(images.describe_images(run.attempts[-1].images))),
            ("packages", _packages(run)),
            *((("ran on" if not number else ""), text) for number, text in enumerate(_machines(run))),
        ]
    )


def print_patch(run: Run) -> int:
    """Print the patch of the tree that was submitted, byte for byte; 1 when there is none."""
    origin = run.store.provenance(run.run_id)
    text = str(origin.get("text") or "")
    for sentence in origin.get("left_out") or ():
        terminal.note(f"left out: {sentence}")
    if not text:
        why = "had no changes" if origin.get("commit") and not origin.get("dirty") else "has kept no patch"
        terminal.note(f"{run.run_id} {why}")
        return 0 if origin.get("commit") and not origin.get("dirty") else 1
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()
    return 0


def print_requirements(run: Run) -> int:
    """Print the packages that a run's ranks had, as `pip freeze` does; 1 when none are known."""
    found = requirements(run.store.events(run.run_id, "requirements"))
    terminal.say(*found) if found else terminal.note(f"{run.run_id} has told of no packages")
    return 0 if found else 1


def _packages(run: Run) -> str:
    found = requirements(run.store.events(run.run_id, "requirements"))
    return f"{len(found)} (cloudtrain show {run.run_id} --requirements)" if found else ""


def _submitter(run: Run) -> str:
    """Return who submitted an attached run, as its job's labels say; the machine is not told to others."""
    user = (run.record.job.get("labels") or {}).get("user")
    return f"by {user}" if user else ""


def _commit(origin: Mapping[str, Any]) -> str:
    if not origin.get("commit"):
        return "none: the source is in no git work tree"
    return f"{origin['commit']}{' with changes' if origin.get('dirty') else ''}"


def _patch(origin: Mapping[str, Any], run_id: str) -> str:
    text = str(origin.get("text") or "")
    if not text:
        return ""
    files = sum(line.startswith("diff --git ") for line in text.splitlines())
    words = f"{files} file{'s' * (files != 1)}, {len(text.splitlines())} lines"
    return f"{words} (cloudtrain show {run_id} --patch)"


def _left_out(origin: Mapping[str, Any]) -> str:
    said = list(origin.get("left_out") or ())
    more = [f"and {len(said) - SHOWN} more"] if len(said) > SHOWN else []
    return "\n".join([*said[:SHOWN], *more])


def _machines(run: Run) -> list[str]:
    """Return a line for every node of the newest attempt: what its launcher, and a trainer, said of the world."""
    newest = run.attempts[-1].attempt_id
    nodes: dict[int, dict[str, Any]] = {}
    for event in run.store.events(run.run_id, "world"):
        if event.attempt == newest:
            nodes.setdefault(event.node, {}).update(event.data)
    lines = []
    for node, said in sorted(nodes.items()):
        versions = said.get("versions")
        parts = [str(said["hostname"])] if said.get("hostname") else []
        parts += [f"Python {said['python']}"] if said.get("python") else []
        parts += [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
        parts += [f"{said['gpus']} GPUs"] if said.get("gpus") else []
        parts += [str(said["device"])] if said.get("device") else []
        lines.append(f"node {node}: {', '.join(parts)}")
    return lines[:8] + ([f"and {len(lines) - 8} nodes more"] if len(lines) > 8 else [])

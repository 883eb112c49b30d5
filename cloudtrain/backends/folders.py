"""List the attempts in a folder of runs on a machine, by the labels that each one has in a file beside its plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import Any

from cloudtrain.backends.plan import FoundAttempt
from cloudtrain.nodes.rpc import Agent

PLAN = "plan.json"


def labelled(
    agent: Agent,
    root: str,
    file: str,
    wanted: tuple[str, str],
    known: Container[str],
    find: Callable[[str], str | None],
) -> Iterator[FoundAttempt]:
    """Yield the attempts that have a label, name and value; blocking. Raises BackendError.

    Args:
        root: the folder that holds `runs`.
        file: the file in an attempt's folder that holds its labels, or an object with `labels`.
        known: ids of attempts that are left out.
        find: the backend's own.
    """
    for path, text in agent.ask("texts", folder=f"{root}/runs", patterns=[f"*/a*/{file}"]).value.items():
        run_id, number, _ = path.split("/")
        labels = _parse(text)
        labels = labels.get("labels", labels)
        if f"{run_id}-{number}" not in known and labels.get(wanted[0]) == wanted[1]:
            plan = _parse(agent.ask("read", path=f"{root}/runs/{run_id}/{number}/{PLAN}").data)
            if handle := find(f"{run_id}-{number}"):
                yield FoundAttempt(f"{run_id}-{number}", handle, {"manifest": plan.get("manifest"), "about": plan})


def _parse(text: str | bytes) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}

"""Which packages a run's ranks had: what node 0's launcher told of its interpreter once they were started."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cloudtrain.events import Event

_LINE = re.compile(r"[a-z0-9][a-z0-9.-]*==[\w.+!]+", re.ASCII)


def requirements(events: Iterable[Event]) -> list[str]:
    """Return NAME==VERSION of the newest start that told of its packages, sorted; `told` are its run's events in order."""
    lines: list[str] = []
    for event in events:
        if event.kind != "requirements":
            continue
        packages = event.data.get("packages")
        if event.data.get("part") == 0:
            lines = []  # another attempt, or another start of one
        lines += [line for line in packages if isinstance(line, str)] if isinstance(packages, list) else []
    return sorted({line for line in lines if len(line) < 200 and _LINE.fullmatch(line)})

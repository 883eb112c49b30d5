"""Send the next attempt of a run in a process of its own, which alone has the environment of the run's shell."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from cloudtrain.events import Status
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import environment


def run_sender(
    home: Path, run_id: str, me: Process, environ: Mapping[str, str], end: tuple[str, Status] | None = None
) -> int:
    """Look at a run in a process that may send its next attempt, and return its exit code; blocking. Raises OSError.

    `end` is the id of the newest attempt and how it was seen to end.
    """
    command = [sys.executable, "-m", "cloudtrain.runs.watching.watch", run_id, str(home), str(me)]
    done = subprocess.run(
        command,
        input=f"{json.dumps(dict(environ))}\n{json.dumps([end[0], asdict(end[1])] if end else None)}".encode(),
        env=environment.select(environ, environment.BASE),
        cwd="/",
        check=False,
    )
    return done.returncode

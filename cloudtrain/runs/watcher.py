"""Start the watcher of a run as a detached process; start another one only after the first has died."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from cloudtrain.backends.api import Plan
from cloudtrain.backends.manifest import secret_names, secret_sources
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import detach

STARTING = "watch.starting"  # in a run's folder: a watcher was started, and has not taken its lease yet
BIRTH_S = 30.0  # how long it may take for that; then it is taken for dead


def start(store: Store, plan: Plan, *, instead: bool = False) -> None:
    """Start the watcher of a run as a detached process; returns at once.

    With `instead` of one that has died: not while another one that was started has yet to take its lease, which takes
    seconds on a busy machine, and would take longer with every further one.
    """
    folder = store.home / "runs" / plan.run_id
    folder.mkdir(parents=True, exist_ok=True)
    starting = folder / STARTING
    with suppress(OSError):
        if instead and abs(time.time() - starting.stat().st_mtime) < BIRTH_S:
            return
    with suppress(OSError):
        starting.touch()
    hidden = secret_names(plan)
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    secrets = {name: os.environ[name] for name in secret_sources(plan) if name in os.environ}
    # Nicer than the job: where ranks share this machine's cores, the watcher waits, not they.
    command = ["nice", "-n", "5", sys.executable, "-m", "cloudtrain.runs.watch", plan.run_id, str(store.home)]
    detach(command, given=json.dumps(secrets).encode(), log=folder / "watch.log", env=environ, cwd=Path("/"))

"""Hand a run to the watcher of its home, one process for all runs of this host; start that process where none lives.

The environment of this shell goes with the run, over a private socket or the new process's standard input: it is neither
stored nor visible in /proc. The watcher confirms once it has the run's lease.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from cloudtrain.backends.api import Plan
from cloudtrain.backends.manifest import secret_sources
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import detach
from cloudtrain.runs.planning import environment
from cloudtrain.runs.sending import mailbox, watch_log
from cloudtrain.runs.sending.mailbox import Message

STARTING = "watch.starting"  # in the home: a watcher was started and is not elected yet
BIRTH_S = 30.0  # how long that may take; then it is taken for dead
DRIVER_S = 15.0  # the same of a sweep's process
PATIENCE_S = 2.0  # how long a submit waits for a watcher that another one has just started
CONFIRM_S = 5.0  # how long for its answer


def start(store: Store, plan: Plan, *, instead: bool = False) -> None:
    """Hand a run to the watcher, which is started where there is none; blocks until it has confirmed, or was started.

    With `instead` of a watcher that has died this process is a reader: the run keeps what is known of its environment,
    and no other watcher is started while one that was started is not up yet.
    """
    message: Message = {
        "do": "watch",
        "run": plan.run_id,
        "environ": dict(os.environ),
        "sources": sorted(secret_sources(plan)),
        "own": not instead,
    }
    if _hand_over(store, message):
        return
    if _is_fresh(store.home / STARTING, store.clock):
        if instead:
            return
        end = store.clock.monotonic() + PATIENCE_S
        while _is_fresh(store.home / STARTING, store.clock) and store.clock.monotonic() < end:
            store.clock.sleep(0.02)
        if _hand_over(store, message):
            return
    store.offer(plan.run_id)  # should this one die at once, the next one finds the run
    _start_process(store.home, message)


def look_now(store: Store, run_id: str) -> None:
    """Tell the watcher that something has happened to a run, such as a cancel; blocks for a moment."""
    if (holder := store.watcher()) and holder.is_valid(store.clock):
        mailbox.call(holder.address, {"do": "look", "run": run_id}, CONFIRM_S)


def give_missing(store: Store, run_id: str) -> None:
    """Hand the watcher the variables of a run that it lacks and this shell has: values that are stored nowhere."""
    record = store.environments([run_id]).get(run_id)
    found = {name: os.environ[name] for name in record.lacking if name in os.environ} if record else {}
    if found and (holder := store.watcher()) and holder.is_valid(store.clock):
        mailbox.call(holder.address, {"do": "fill", "run": run_id, "environ": found}, CONFIRM_S)


def is_newer(version: str, other: str) -> bool:
    """Return whether a cloudtrain replaces the watcher of another one."""
    return _version_key(version) > _version_key(other)


@cache
def own_version() -> str:
    """Return this cloudtrain's version and when its newest module was changed: an upgrade in place is newer too."""
    from cloudtrain.__about__ import __version__

    newest = max(path.stat().st_mtime_ns for path in Path(__file__).parents[2].rglob("*.py"))
    return f"{__version__}+{newest}"


def starting(home: Path, sweep_id: str) -> Path:
    """Return the file that says that a sweep's process was started and has not taken its lease yet."""
    return home / "sweeps" / f"{sweep_id}.starting"


def drive(home: Path, sweep_id: str, shell: Mapping[str, str]) -> bool:
    """Start the process that drives a sweep, with the environment of a shell; returns at once.

    Returns False, and starts nothing, where one was started a moment ago that has not taken its lease yet.
    """
    marker = starting(home, sweep_id)
    if _is_fresh(marker, seconds=DRIVER_S):
        return False
    marker.parent.mkdir(exist_ok=True)
    marker.touch()
    command = ["nice", "-n", "5", sys.executable, "-m", "cloudtrain.sweeps.drive", str(home), sweep_id]
    base = environment.select(shell, environment.BASE)
    detach(command, given=json.dumps(dict(shell)).encode(), log=home / watch_log.NAME, env=base, cwd=Path("/"))
    return True


def _version_key(version: str) -> tuple[list[int], int]:
    number, _, changed = version.partition("+")
    return [int(part) for part in re.findall(r"\d+", number)], int(changed or 0)


def _hand_over(store: Store, message: Message) -> bool:
    """Send a run to the watcher; False where none confirms, or this cloudtrain is newer and replaces it."""
    holder = store.watcher()
    if holder is None or not holder.is_valid(store.clock) or is_newer(own_version(), holder.version):
        return False
    return mailbox.call(holder.address, message, CONFIRM_S) is not None


def _is_fresh(marker: Path, clock: Clock = SYSTEM, seconds: float = BIRTH_S) -> bool:
    """Return whether a process that was started a moment ago may still take its lease."""
    with suppress(OSError):
        return abs(clock.now() - marker.stat().st_mtime) < seconds
    return False


def _start_process(home: Path, message: Message) -> None:
    with suppress(OSError):
        (home / STARTING).touch()
    # Nicer than the job: where ranks share this machine's cores, the watcher waits, not they.
    command = ["nice", "-n", "5", sys.executable, "-m", "cloudtrain.runs.watching.watch_all", str(home)]
    hidden = message["sources"]
    begins_with = {
        name: value for name, value in environment.select(os.environ, environment.BASE).items() if name not in hidden
    }
    detach(command, given=json.dumps([message]).encode(), log=home / watch_log.NAME, env=begins_with, cwd=Path("/"))

"""Stop what still runs in a node's folder, measure folders and delete those of runs. Sent to nodes as text, like agent.py."""

from __future__ import annotations

import os
import shutil
import time

from cloudtrain.nodes.files import AnyPath, expand_path
from cloudtrain.nodes.supervisor import FINAL, FIRST_STATUS_S, kill_leftovers, read_state, stop


def stop_and_wait(node: AnyPath) -> None:
    """Stop a node, wait until it has ended, and kill its leftover processes. Blocking."""
    node_state = read_state(node)
    if node_state is None:
        return
    if node_state["state"] not in FINAL:
        stop(node)
        grace = float((node_state["raw"] or {}).get("grace_s") or 30.0)
        deadline = time.monotonic() + grace + FIRST_STATUS_S
        while (
            (current := read_state(node)) is not None and current["state"] not in FINAL and time.monotonic() < deadline
        ):
            time.sleep(0.05)
    kill_leftovers(node)


def measure(folder: AnyPath) -> int | None:
    """Return the bytes of the files below a folder, None where it does not exist."""
    top = expand_path(folder)
    if not top.is_dir():
        return None
    return sum(
        os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118 - many files
        for path, _, names in os.walk(top)
        for name in names
    )


def remove_run(runs: AnyPath, run: str, stops: bool = True) -> None:
    """Delete the folder of a run below `runs`, after its processes here have ended; does nothing where it is gone.

    Blocking. Raises OSError. `stops`: its nodes were started on this machine.
    """
    if not run or run != os.path.basename(run) or run.startswith("."):  # noqa: PTH119 - a word, no path
        raise ValueError(f"{run!r} is not a run")
    folder = expand_path(runs) / run
    for node in sorted(folder.glob("a*/node-*")) if stops else ():
        stop_and_wait(node)
    if folder.exists():
        shutil.rmtree(folder)

"""Translate an Accelerate configuration into the environment that `accelerate launch` would give the ranks."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping

from ..errors import Refused

MODULE = "launcher.prepare.accelerate_launch"
HERE = os.path.abspath(__file__).rpartition(os.sep + MODULE.partition(".")[0] + os.sep)[0]  # where `launcher` is
# The launcher's own matters: the world, and what it sets for every rank.
OURS = frozenset({"CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONPATH"})


def environment(python: str, path: str, processes: int, environ: Mapping[str, str], name: str = "") -> dict[str, str]:
    """Return the variables that a configuration stands for; blocking (imports Accelerate once).

    Args:
        python: the ranks' interpreter, whose Accelerate makes them.
        path: the file, YAML or JSON.
        processes: the job's, in all.
        environ: the environment of the ranks' node.
        name: what to call the file in a sentence; left out: its name.

    Raises Refused for a file that Accelerate does not understand, or of which it would ignore a part.
    """
    name = name or os.path.basename(path)
    if not os.path.isfile(path):
        raise Refused(f"the source does not contain the Accelerate configuration {name}")
    done = subprocess.run(
        [python, "-m", MODULE, os.path.abspath(path), str(processes)],
        cwd=HERE,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environ),
        text=True,
        check=False,
    )
    try:
        if done.returncode != 0:
            raise ValueError((done.stderr.strip() or "no reason given").splitlines()[-1])
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise Refused(f"Accelerate cannot use {name}: {error}") from None
    if found["unused"]:
        raise Refused(f"{name}: Accelerate {found['version']} ignores {', '.join(found['unused'])}: remove it")
    made = {variable: str(value) for variable, value in found["variables"].items() if variable not in OURS}
    if made.get("ACCELERATE_USE_CPU", "").lower() == "false":
        del made["ACCELERATE_USE_CPU"]  # the job's resources decide
    return made

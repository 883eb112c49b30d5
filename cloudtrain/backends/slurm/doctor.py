"""`cloudtrain doctor` for Slurm: the login node, the shared folder, and whether Slurm would take a job."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.slurm import client, request
from cloudtrain.errors import BackendError, Problem
from cloudtrain.nodes.agents import Agent, LocalAgent

Run = Callable[[Sequence[str]], Mapping[str, Any]]  # runs a command on the login node


def check_cluster(agent: Agent, run: Run, options: Mapping[str, Any]) -> list[Problem]:
    """Return the problems that keep a job from running on this cluster; blocking, some seconds."""
    folder = str(options["folder"])
    try:
        facts = agent.ask("facts", root=folder).value
        version = run(["sbatch", "--version"])
    except BackendError as error:
        return [Problem(error.message, "options.slurm.login", error.hint)]
    problems = []
    if not facts["writable"]:
        problems.append(Problem(f"{folder} cannot be written", "options.slurm.folder"))
    elif facts["free_bytes"] < 1 << 30:
        problems.append(Problem(f"less than 1 GiB is free below {folder}", "options.slurm.folder"))
    if version["code"] != 0:
        hint = "set options.slurm.login to the login node"
        return [*problems, Problem(f"sbatch does not run: {version['err'].strip()}", "options.slurm", hint)]
    return [*problems, *_check_submission(agent, run, options, on_node=not problems)]


def _check_submission(agent: Agent, run: Run, options: Mapping[str, Any], *, on_node: bool) -> Iterator[Problem]:
    """Check with `sbatch --test-only` that Slurm accepts a job, and `on_node` that a free node sees the folder."""
    folder = str(options["folder"])
    manifest = Manifest("doctor", 1, ("true",), 1, 1, max_runtime_s=60, grace_s=1)
    argv = request.sbatch_arguments("cloudtrain-doctor", "doctor", folder, manifest, {"minutes": 6}, options)
    refused = list(try_submission(run, argv))
    yield from refused
    if refused or not on_node:
        return
    probe = f"{folder}/.cloudtrain-doctor"
    agent.ask("write", path=probe, given=b"seen")
    placement = [
        argument
        for argument in _placement(argv)
        if not argument.startswith(("--parsable", "--export", "--no-requeue", "--time"))
    ]
    completed = run(["srun", "--immediate=5", "--quiet", "--time=1", "--mpi=none", *placement, "cat", probe])
    busy = "Unable to allocate" in completed["err"] or completed["code"] is None
    if completed["out"].strip() != "seen" and not busy:
        error_lines = completed["err"].strip().splitlines()
        yield Problem(
            f"a node cannot see {folder}" + (f": {error_lines[-1]}" if error_lines else ""),
            "options.slurm.folder",
            "choose a folder on the cluster's shared file system",
        )


def try_submission(run: Run, argv: Sequence[str]) -> Iterator[Problem]:
    """Yield why Slurm would not start a job with these arguments of sbatch: `sbatch --test-only` sends nothing."""
    dry_run = run(["sbatch", "--test-only", *_placement(argv), "--wrap=true"])
    if dry_run["code"] != 0:
        refused = client.error_for_command(dry_run)
        yield Problem(refused.message, "options.slurm", refused.hint or "`sinfo` and `sacctmgr` list the valid values")


def _placement(argv: Sequence[str]) -> list[str]:
    """Return the arguments of sbatch without its name, --parsable, the script and files that may not be there yet."""
    return [argument for argument in argv[2:-1] if not argument.startswith(("--output", "--open-mode", "--chdir"))]


def discover_options() -> dict[str, Any]:
    """Return options for the cluster whose login node this machine is: default partition, account and folder."""
    if not shutil.which("sinfo"):
        return {}
    try:
        run = partial(LocalAgent().ask, "command", hide=client.HIDDEN_VARIABLES, limit_s=10.0)
        names = run(argv=["sinfo", "--noheader", "--format=%P"]).value["out"].split()
        user = run(argv=["sacctmgr", "--noheader", "--parsable2", "show", "user", "withassoc", "format=DefaultAccount"])
    except BackendError:
        return {}
    options: dict[str, Any] = {"folder": str(Path.home() / "cloudtrain")}
    default = [name.rstrip("*") for name in names if name.endswith("*")] or names[:1]
    if default:
        options["partition"] = default[0]
    accounts = [line for line in user.value["out"].split() if line]
    return {**options, "account": accounts[0]} if len(set(accounts)) == 1 else options

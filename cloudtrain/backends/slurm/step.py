"""A program beside the launcher on a node of a job: a step that shares the job's processors, memory and GPUs (--overlap)."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloudtrain.backends.shell import Shell
from cloudtrain.backends.slurm import client, script
from cloudtrain.errors import BackendError
from cloudtrain.nodes.ssh import Host
from cloudtrain.nodes.ssh_command import client_argv

Run = Callable[[Sequence[str]], Mapping[str, Any]]


def step_shell(
    run: Run,
    options: Mapping[str, Any],
    job: str,
    node: int,
    words: Sequence[str],
    *,
    stdin: bool,
    terminal: bool,
) -> Shell:
    """Return the srun that starts Python on a node of a job, over SSH where the login node is another machine."""
    host = node_name(run, job, node)
    python = shlex.join(script.python_command(options, words, gpus=True))
    setup = [*script.environment_lines(options), *options.get("setup", ())]
    begun = "".join(f"{{ {line}\n}} </dev/null >&2\n" for line in setup) + f"exec {python}"
    streams = ["--pty"] if terminal else [] if stdin else ["--input=none"]
    step = ["srun", f"--jobid={job}", "--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--quiet",
            "--mpi=none", "--cpu-bind=none", "--unbuffered", "--job-name=inside", "--export=ALL", *streams]  # fmt: skip
    argv = [*step, "bash", "-lc" if setup else "-c", begun]
    login = options.get("login")
    if not login:
        return Shell(tuple(argv))
    there = Host(**login)
    return Shell(client_argv(there, shlex.join(argv), stdin=stdin, terminal=terminal), host=there.label)


def node_name(run: Run, job: str, node: int) -> str:
    """Return the host of a job's node; blocking. Raises BackendError where the job does not run, or has no such node."""
    asked = run(["squeue", "--noheader", f"--jobs={job}", "--states=RUNNING", "--format=%N"])
    if asked["code"] != 0:
        raise client.error_for_command(asked, f"the nodes of job {job} are not known")
    names = str(asked["out"]).strip()
    if not names:
        raise BackendError(f"the Slurm job {job} is not running now", f"squeue --job {job}")
    listed = run(["scontrol", "show", "hostnames", names])
    if listed["code"] != 0:
        raise client.error_for_command(listed, f"the nodes of job {job} are not known")
    hosts = str(listed["out"]).split()
    if node >= len(hosts):
        raise BackendError(f"there is no node {node}: they are counted from 0, and the last is {len(hosts) - 1}")
    return hosts[node]

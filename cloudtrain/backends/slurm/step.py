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
    host, component = find_node(run, job, node)
    python = shlex.join(script.python_command(options, words, gpus=True))
    setup = [*script.environment_lines(options), *options.get("setup", ())]
    begun = "".join(f"{{ {line}\n}} </dev/null >&2\n" for line in setup) + f"exec {python}"
    streams = ["--pty"] if terminal else [] if stdin else ["--input=none"]
    step = ["srun", f"--jobid={job}", *component, "--overlap", f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--quiet",
            "--mpi=none", "--cpu-bind=none", "--unbuffered", "--job-name=inside", "--export=ALL", *streams]  # fmt: skip
    argv = [*step, "bash", "-lc" if setup else "-c", begun]
    login = options.get("login")
    if not login:
        return Shell(tuple(argv))
    there = Host(**login)
    return Shell(client_argv(there, shlex.join(argv), stdin=stdin, terminal=terminal), host=there.label)


def find_node(run: Run, job: str, node: int) -> tuple[str, list[str]]:
    """Return the host of a job's node, and the arguments by which srun finds its component of a heterogeneous job.

    Blocking. Raises BackendError where the job does not run, or has no such node.
    """
    asked = run(["squeue", "--noheader", f"--jobs={job}", "--states=RUNNING", "--format=%i|%D|%N"])
    if asked["code"] != 0:
        raise client.error_for_command(asked, f"the nodes of job {job} are not known")
    rows = [line.split("|") for line in str(asked["out"]).split()]
    rows.sort(key=lambda row: int(row[0].partition("+")[2] or 0))
    if not rows:
        raise BackendError(f"the Slurm job {job} is not running now", f"squeue --job {job}")
    listed = run(["scontrol", "show", "hostnames", ",".join(names for _, _, names in rows)])
    if listed["code"] != 0:
        raise client.error_for_command(listed, f"the nodes of job {job} are not known")
    hosts = str(listed["out"]).split()
    if node >= len(hosts):
        raise BackendError(f"there is no node {node}: they are counted from 0, and the last is {len(hosts) - 1}")
    components = [number.partition("+")[2] for number, nodes, _ in rows for _ in range(int(nodes))]
    return hosts[node], [f"--het-group={components[node]}"] if components[node] else []

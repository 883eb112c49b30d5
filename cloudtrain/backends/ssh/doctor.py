"""`cloudtrain doctor` for SSH machines: checks each machine, then the connections between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cloudtrain.backends.ssh.launch import clock_offset_s
from cloudtrain.errors import CloudtrainError, Problem
from cloudtrain.job.units import format_count, format_size
from cloudtrain.nodes.agents import call_all
from cloudtrain.nodes.rpc import RemoteAgent

FREE_BYTES = 1 << 30
_Machine = tuple[str, RemoteAgent, str]  # label, place, address by which the others see it


def check_machines(machines: Sequence[_Machine], root: str) -> tuple[list[Problem], dict[str, str]]:
    """Return the problems that keep a job from running on these machines, and a line on each; blocking, some seconds."""
    answers = call_all(lambda machine: _measure_facts(machine[1], root), machines)
    problems = []
    reachable = []
    for (label, agent, internal), answer in zip(machines, answers, strict=True):
        if isinstance(answer, CloudtrainError):
            problems.append(Problem(answer.message, hint=answer.hint))
            continue
        reachable.append((label, agent, internal))
        problems += _check_machine(label, answer)
    counts = {answer["gpus"] for answer in answers if isinstance(answer, dict)}
    if len(counts) > 1:
        problems.append(Problem(f"the machines have different numbers of GPUs: {sorted(counts)}"))
    lines = {label: _describe(answer) for (label, _, _), answer in zip(machines, answers, strict=True)}
    return problems + list(_check_connections(reachable)), lines


def _measure_facts(agent: RemoteAgent, root: str) -> dict[str, Any]:
    facts: dict[str, Any] = agent.ask("facts", root=root).value
    return {**facts, "skew_s": abs(clock_offset_s(agent))}


def _describe(answer: dict[str, Any] | CloudtrainError) -> str:
    """Return what was found on a machine, in one line."""
    if isinstance(answer, CloudtrainError):
        return "not reached"
    facts = [
        f"Python {'.'.join(map(str, answer['python']))}",
        f"torch {answer['torch']}" if answer["torch"] else "no torch",
        format_count(answer["gpus"], "GPU"),
        f"{format_size(answer['free_bytes'])} free",
        f"its clock differs by {answer['skew_s']:.0f} s" if answer["skew_s"] else "its clock is right",
    ]
    return f"reached: {', '.join(facts)}"


def _check_machine(label: str, facts: dict[str, Any]) -> Iterator[Problem]:
    if facts["torch"] is None:
        yield Problem(
            f"{label}: {facts['executable']} cannot import torch",
            hint="set python (its interpreter) or setup (shell lines) of this host",
        )
    if not facts["writable"]:
        yield Problem(f"{label}: {facts['folder']} cannot be written", hint="set directory to another folder")
    elif facts["free_bytes"] < FREE_BYTES:
        free = facts["free_bytes"] >> 20
        yield Problem(
            f"{label}: {free:,} MiB are free below {facts['folder']}, less than 1 GiB", hint="free some space"
        )
    if facts["skew_s"]:
        message = f"{label}: its clock differs by {facts['skew_s']:.0f} s from this machine's"
        yield Problem(
            message,
            hint="start a time service there (chrony, systemd-timesyncd); cloudtrain corrects a run's "
            "times by the difference at its start",
        )


def _check_connection(host: str, port: int, machine: _Machine) -> str | None:
    error: str | None = machine[1].ask("reach", host=host, port=port).value
    return error


def _check_connections(machines: Sequence[_Machine]) -> Iterator[Problem]:
    """Check that every machine can connect to every other: each listens on a free port, the others connect."""
    if len(machines) < 2:
        return
    for number, (label, agent, internal) in enumerate(machines):
        try:
            port = agent.ask("listen", host=internal).value
        except CloudtrainError as error:
            message = f"{label}: cannot listen on any port of {internal} ({error.message})"
            yield Problem(message, hint="set internal to the address that the other nodes can reach")
            continue
        others = [machine for at, machine in enumerate(machines) if at != number]
        errors = call_all(partial(_check_connection, internal, port), others)
        for (other, _, _), problem in zip(others, errors, strict=True):
            if problem is not None:
                message = f"{other} does not reach {internal}:{port} of {label}: {problem}"
                yield Problem(message, hint="open all ports between the nodes, or set internal to another address")


def discover_hosts() -> dict[str, Any]:
    """Return the hosts that ~/.ssh/config names, as options."""
    try:
        text = Path("~/.ssh/config").expanduser().read_text()
    except (OSError, ValueError, RuntimeError):
        return {}
    names = [name for line in re.findall(r"(?im)^[ \t]*host[ \t]+(.+)$", text) for name in line.split()]
    hosts = [name for name in names if re.fullmatch(r"[\w.:-]+", name)]
    return {"hosts": [{"address": name} for name in dict.fromkeys(hosts)]} if hosts else {}

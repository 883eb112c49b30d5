"""What machines over SSH lack: each by itself, then between them (doctor)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from cloudtrain.errors import CloudtrainError, Problem
from cloudtrain.nodes.rpc import RemoteAgent
from cloudtrain.nodes.ssh import call_all

FREE_BYTES = 1 << 30
SKEW_S = 2.0  # clocks may differ by so much; logs are merged by time
_Machine = tuple[str, RemoteAgent, str]  # label, place, address by which the others see it


def inspect(machines: Sequence[_Machine], root: str) -> list[Problem]:
    """Return what stands in the way of running a job over these machines; blocking, some seconds."""
    answers = call_all(lambda machine: _facts(machine[1], root), machines)
    problems = []
    good = []
    for (label, agent, internal), answer in zip(machines, answers, strict=True):
        if isinstance(answer, CloudtrainError):
            problems.append(Problem(answer.message, hint=answer.hint))
            continue
        good.append((label, agent, internal))
        problems += _alone(label, answer)
    counts = {answer["gpus"] for answer in answers if isinstance(answer, dict)}
    if len(counts) > 1:
        problems.append(Problem(f"the machines have different numbers of GPUs: {sorted(counts)}"))
    return problems + list(_between(good))


def _facts(agent: RemoteAgent, root: str) -> dict[str, Any]:
    agent.ask("facts", root=root)  # the connection and its Python are there from now on
    before = time.time()
    found: dict[str, Any] = agent.ask("facts", root=root).value
    after = time.time()
    # Half of the way is the best guess at when it looked; what may be travel is not held against it.
    found["skew_s"] = max(before - found["clock"], found["clock"] - after, 0.0)
    return found


def _alone(label: str, found: dict[str, Any]) -> Iterator[Problem]:
    if found["torch"] is None:
        yield Problem(f"{label}: {found['executable']} has no torch", hint="name its interpreter: python, or setup")
    if not found["writable"]:
        yield Problem(f"{label}: {found['folder']} cannot be written", hint="name another folder: directory")
    elif found["free_bytes"] < FREE_BYTES:
        free = found["free_bytes"] >> 20
        yield Problem(
            f"{label}: {free:,} MiB are free below {found['folder']}, less than 1 GiB", hint="free some space"
        )
    if found["skew_s"] > SKEW_S:
        said = f"{label}: its clock is {found['skew_s']:.0f} s off ours"
        yield Problem(said, hint="start its time service (chrony, systemd-timesyncd): logs are merged by time")


def _reach(host: str, port: int, machine: _Machine) -> str | None:
    found: str | None = machine[1].ask("reach", host=host, port=port).value
    return found


def _between(machines: Sequence[_Machine]) -> Iterator[Problem]:
    """Find out who cannot connect to whom: each listens on a free port, the others try."""
    if len(machines) < 2:
        return
    for number, (label, agent, internal) in enumerate(machines):
        try:
            port = agent.ask("listen", host=internal).value
        except CloudtrainError as error:
            said = f"{label}: no port of {internal} can be listened on ({error.message})"
            yield Problem(said, hint="name the address by which the nodes see it: internal")
            continue
        others = [machine for at, machine in enumerate(machines) if at != number]
        tries = call_all(partial(_reach, internal, port), others)
        for (other, _, _), why in zip(others, tries, strict=True):
            if why is not None:
                said = f"{other} does not reach {internal}:{port} of {label}: {why}"
                yield Problem(said, hint="open all ports between the nodes, or name another address: internal")

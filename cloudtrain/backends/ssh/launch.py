"""Begin an attempt on SSH machines: choose those that answer, bring the source, start a supervisor on each."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import Plan
from cloudtrain.backends.folder import PLAN
from cloudtrain.backends.manifest import chosen_gpus
from cloudtrain.backends.ssh.machines import Machine, make_handle
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BackendError, CloudtrainError, NoCapacity, NoService, NotReached, Unreachable, raise_first
from cloudtrain.nodes import paths, transfer
from cloudtrain.nodes.agents import call_all
from cloudtrain.nodes.rpc import RemoteAgent

if TYPE_CHECKING:
    from cloudtrain.source.bundle import Bundle

SKEW_S = 2.0  # allowed difference of clocks
START_S = 120.0  # for a supervisor, and for the end of what an earlier attempt left running


def choose_machines(
    plan: Plan, root: str, find_begun: Callable[[str], str | None]
) -> list[tuple[Machine, Mapping[str, Any]]]:
    """Return the machines by node rank, each with its answer to `prepare`; raises NotReached if too few answer.

    Repeats the choice of an interrupted submit: `find_begun` returns the handle that has begun in a folder. Node 0 stays
    on the machine that has the run's checkpoints; where there are none (`files_of` is 0) any machine will do.
    """
    machines = [Machine({}, host) for host in plan.request["hosts"]]
    arguments = {"root": root, "run": plan.run_id, "attempt": plan.attempt, "sha256": plan.bundle["sha256"]}
    answers = call_all(lambda machine: machine.agent.ask("prepare", timeout_s=START_S, **arguments).value, machines)
    unreachable = {
        m.label: answer for m, answer in zip(machines, answers, strict=True) if isinstance(answer, CloudtrainError)
    }
    _refuse_denied([error for error in unreachable.values() if not isinstance(error, Unreachable)], plan)
    prepared = {m.label: answer for m, answer in zip(machines, answers, strict=True) if isinstance(answer, dict)}
    earlier_choices = list(
        dict.fromkeys(tuple(answer["request"]["hosts"]) for answer in prepared.values() if answer["request"])
    )
    if len(earlier_choices) > 1:
        begun = find_begun(str(plan.request["folder"]))
        earlier_choices = [
            hosts for hosts in earlier_choices if make_handle(hosts, plan.request["folder"]) == begun
        ] or earlier_choices
    if earlier_choices:
        raise_first([unreachable[label] for label in earlier_choices[0] if label in unreachable])
        return [(m, prepared[label]) for label in earlier_choices[0] for m in machines if m.label == label]
    num_nodes, min_nodes = machine_count(plan), min_nodes_of(plan)
    # Which attempt of the run had its node 0 there last. Without `output` its disk has the run's checkpoints.
    first = {label: int(answer["first"]) for label, answer in prepared.items()}
    files_of = int(plan.request.get("files_of", 1)) if plan.attempt > 1 and plan.manifest["output"] is None else 0
    available = [machine for machine in machines if machine.label in prepared]
    if files_of:
        available.sort(key=lambda machine: -first[machine.label])
    available = with_gpus(available, plan)
    if len(available) < min_nodes or (unreachable and max((first[m.label] for m in available), default=0) < files_of):
        errors = "; ".join(_with_hint(error) for error in unreachable.values())
        shortage = (
            f"{len(available)} of {num_nodes} nodes"
            if len(available) < min_nodes
            else "no node that may have the checkpoints, which without `output` are on node 0's disk,"
        )
        waits = not all(isinstance(error, NoService) for error in unreachable.values())
        raise NotReached(f"{shortage} can be reached: {errors}", waits=waits)
    return [(available[at], prepared[available[at].label]) for at in _places(plan) if at < len(available)]


def _refuse_denied(errors: Sequence[CloudtrainError], plan: Plan) -> None:
    """Raise the first error of machines that refuse our login; as NoCapacity where the job names other candidates."""
    refused = [error for error in errors if isinstance(error, BackendError)]
    raise_first([error for error in errors if error not in refused])  # such as a missing package here
    if refused:  # the fix goes into the message, which the history keeps
        raise (NoCapacity if len(plan.candidates) > 1 else BackendError)("; ".join(map(_with_hint, refused)))


def _with_hint(error: CloudtrainError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def with_gpus(machines: list[Machine], plan: Plan) -> list[Machine]:
    """Return the machines that show as many GPUs as the job asks for, of a job with roles in the order of its nodes.

    Raises BackendError where they are too few.
    """
    asked = int(plan.manifest["gpus_per_node"])
    by_node: list[int] = []
    for place, count in zip(_places(plan), plan.request.get("gpus", ()), strict=False):
        by_node += [0] * (place + 1 - len(by_node))
        by_node[place] += int(count or 0)
    if not asked and not any(by_node):
        return machines
    answers = call_all(lambda machine: machine.agent.ask("command", argv=["nvidia-smi", "-L"]).value, machines)
    raise_first(answers)
    counts = [str(answer).count("GPU-") for answer in answers]
    enough = [machine for machine, count in zip(machines, counts, strict=True) if count >= asked]
    if by_node:
        left, chosen = list(zip(machines, counts, strict=True)), {}
        for node in sorted(range(len(by_node)), key=lambda node: -by_node[node]):
            if at := next((each for each in left if each[1] >= by_node[node]), None):
                left.remove(at)
                chosen[node] = at[0]
        enough = [chosen[node] for node in sorted(chosen)]
    if machines and len(enough) < min_nodes_of(plan):
        shown = ", ".join(f"{machine.label} {count}" for machine, count in zip(machines, counts, strict=True))
        wanted = f"nodes with {', '.join(map(str, by_node))} GPUs" if by_node else f"{asked} GPUs per node"
        message = f"{wanted} were requested; the machines have (nvidia-smi): {shown}"
        raise BackendError(message, "remove resources.accelerators: the ranks then use all GPUs of the machines")
    return enough


def deliver_source(plan: Plan, chosen: Sequence[tuple[Machine, Mapping[str, Any]]], root: str, bundle: Bundle) -> None:
    """Unpack the source on the chosen machines and write the attempt's plan and request there; blocking.

    Raises BackendError.
    """
    folder, sha256 = str(plan.request["folder"]), bundle.sha256
    run_dir = plan.request["env"]["CLOUDTRAIN_RUN_DIR"]
    labels = [machine.label for machine, _ in chosen]
    request = {"hosts": labels, "run_dir": run_dir, "labels": dict(plan.job["labels"]), "least": min_nodes_of(plan)}
    mode = paths.folder_mode(plan.request["env"].get("CLOUDTRAIN_UMASK", "077"))

    def deliver(item: tuple[int, tuple[Machine, Mapping[str, Any]]]) -> None:
        rank, (machine, answer) = item

        def extract() -> None:
            machine.agent.ask("folders", path=folder, mode=mode)
            into = f"{folder}/node-{rank}/source"
            machine.agent.ask("extract", root=root, sha256=sha256, into=into, mode=mode, timeout_s=transfer.SEND_S)

        transfer.bring_bundle(machine.agent, root, bundle, answer["bundle"], extract)
        machine.agent.ask("write", plan.to_json().encode(), path=f"{folder}/{PLAN}")
        machine.agent.ask("write", json.dumps(request).encode(), path=f"{folder}/request.json")
        if rank == 0:
            machine.agent.ask("write", str(plan.attempt).encode(), path=f"{root}/runs/{plan.run_id}/first")

    raise_first(call_all(deliver, enumerate(chosen)))


def check_shared_output(plan: Plan, machines: Sequence[Machine]) -> None:
    """Check that an output path is the same folder on all nodes, with a marker file; raises BackendError."""
    output, _ = paths.output_path(plan.manifest["output"])
    if output is None or len(machines) == 1:
        return
    marker_path, marker = f"{plan.request['env']['CLOUDTRAIN_RUN_DIR']}/.shared", os.urandom(8).hex().encode()
    mode = paths.folder_mode(plan.request["env"].get("CLOUDTRAIN_UMASK", "077"))
    machines[0].agent.ask("write", marker, path=marker_path, mode=mode & 0o666)
    contents = call_all(lambda machine: machine.agent.ask("read", path=marker_path).data, machines[1:])
    raise_first(contents)
    for machine, content in zip(machines[1:], contents, strict=True):
        if content != marker:
            raise BackendError(
                f"the output {output} is not the same folder on {machine.label} and {machines[0].label}",
                "set output to a folder that all machines share, or remove it: each node then keeps its own files",
            )


def launch_node(
    plan: Plan, machines: Sequence[Machine], rank: int, control: str | None, secrets: Mapping[str, Any]
) -> dict[str, Any]:
    machine = machines[rank]
    values = {"node.address": machine.internal, "node.rank": str(rank), "node.python": machine.python,
              "nodes": str(len(machines)), "node-0.control": control or ""}  # fmt: skip
    if "gpus" in plan.request:
        values["node.gpus"] = chosen_gpus(plan.request["gpus"][rank])
        values["node.shared"] = "1" if values["node.gpus"] else ""

    def fill(text: str) -> str:
        return re.sub(r"\$\{([\w.-]+)\}", lambda match: values[match[1]], text)

    requested = {name: fill(text) for name, text in plan.request["env"].items()}
    env = {name: text for name, text in requested.items() if text or name != "CLOUDTRAIN_CONTROL"}
    env["CLOUDTRAIN_NODE_NAME"] = machine.label
    if offset_s := clock_offset_s(machine.agent):
        env["CLOUDTRAIN_CLOCK_OFFSET_S"] = (
            f"{offset_s:.1f}"  # so that times of all nodes, and durations, are by our clock
        )
    node = f"{plan.request['folder']}/node-{rank}"
    argv = [fill(argument) for argument in plan.request["argv"]]
    launched = machine.agent.ask("launch", node=node, argv=argv, env=env, secrets=secrets, timeout_s=START_S)
    return dict(launched.value)


def clock_offset_s(agent: RemoteAgent) -> float:
    """Return by how many seconds a machine's clock is behind ours, 0.0 within SKEW_S; the time of travel is no skew."""
    before = SYSTEM.now()
    there = float(agent.ask("clock").value)
    offset_s = max(before - there, 0.0) + min(SYSTEM.now() - there, 0.0)
    return offset_s if abs(offset_s) > SKEW_S else 0.0


def machine_count(plan: Plan) -> int:
    """Return how many machines an attempt needs: nodes of roles that name the same one share it."""
    return len(set(_places(plan)))


def min_nodes_of(plan: Plan) -> int:
    """Return the fewest machines that an attempt begins with."""
    return int(plan.manifest["min_nodes"] or machine_count(plan))


def _places(plan: Plan) -> Sequence[int]:
    """Return the number of each node's machine, by the node's rank."""
    return plan.request.get("machines") or range(int(plan.request["nodes"]))

"""The SSH backend: runs jobs on your own machines, with one detached supervisor on each; installs nothing there.

The handle has the machines by node rank and the attempt's folder on them. The supervisors watch each other, so the job
needs no client while it runs: the client may sleep, exit or be replaced by another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import FETCHABLE, Paths, Plan, Shell, TimeLimit, Traits
from cloudtrain.backends.folder import FOLLOW_S, FolderBackend
from cloudtrain.backends.manifest import Manifest, chosen_gpus, env_secrets, gpu_notes, gpus_of_nodes
from cloudtrain.backends.ssh.launch import (
    START_S,
    check_shared_output,
    choose_machines,
    deliver_source,
    launch_node,
    machine_count,
)
from cloudtrain.backends.ssh.machines import Machine, attempt_nodes, collect_reports, make_handle
from cloudtrain.backends.traits import HONOURED, NO_EFFECT
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, BadJob, CloudtrainError, Problem, Unreachable, raise_first
from cloudtrain.events import Status
from cloudtrain.job import roles, rules
from cloudtrain.job.units import format_count
from cloudtrain.nodes import common_folder, directory, paths
from cloudtrain.nodes.agents import Agent, Node, call_all
from cloudtrain.nodes.ssh import check_installed
from cloudtrain.nodes.ssh_command import client_argv, python_line
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle


LEASE_S = 120.0  # with `lease: client`
LOST_AFTER_S = 600.0
DIRECTORY = "~/.cloudtrain"


KEYS = dict.fromkeys(("num_nodes", "min_nodes", "resources.accelerators", "secrets.env", "secrets.file"), HONOURED)
KEYS |= dict.fromkeys(("limits.max_wait", "roles.resources", "roles.colocate"), HONOURED)
KEYS |= dict.fromkeys(("resources.cpus", "resources.memory", "resources.disk_gb"), NO_EFFECT)
FIXES = {
    "host-memory": "hold less in memory at once (a smaller batch, data read in pieces), or choose hosts with more memory: "
    "cloudtrain rerun RUN -t TARGET",
    "worker-killed": "lower num_workers of the data loader, or hold less in memory in each worker",
    "disk-full": "free space on that machine (df -h), choose another directory or output, or keep fewer checkpoints",
}


class SshBackend(FolderBackend):
    """Runs jobs on machines that are reached over SSH."""

    name = "ssh"
    traits = Traits(Paths.NODES, KEYS, own_machines=True, client="asyncssh", shell=True, fixes=FIXES)
    poll_s = 0.5
    calls_per_s = 2.0  # one call is one request to each machine
    logs_per_s = 20.0  # requests over connections that are open
    follow_s = FOLLOW_S
    labels_file = "request.json"
    lost_after_s: float = LOST_AFTER_S
    variables = ("SSH_AUTH_SOCK", "HOME", "PATH")  # PATH: of a ProxyCommand

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self.workdir = workdir
        self.root = str(options.get("directory") or DIRECTORY).rstrip("/")
        self.runs = f"{self.root}/runs"
        self.umask = paths.umask(options.get("share"))
        lease = str(options.get("lease") or "supervisors")
        self.lease_s = float(options.get("lease_s") or LEASE_S) if lease == "client" else None
        self.lost_after_s = float(options.get("lost_after_s") or LOST_AFTER_S)
        self.machines = [Machine(dict(options), dict(host)) for host in options.get("hosts") or []]
        self._checked: dict[str, str] = {}  # by machine, what the last `check` found there
        identity = [[machine.to_dict() for machine in self.machines], lease, self.lost_after_s]
        self.group = f"ssh {json.dumps(identity, sort_keys=True)}"

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.ssh.options import SshOptions

        return SshOptions

    # -- plan and submit -----------------------------------------------------------------------------------------------

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        about = provenance.about(self.name, job, bundle) if job.output else None
        manifest = Manifest.of(job, run_id, attempt, about)
        output, problems = paths.output_path(job.output)
        problems += paths.check_inputs(job) + paths.check_shared_output(job)
        count = max(roles.machines(job)) + 1 if job.roles else manifest.nodes
        if not self.machines:
            problems.append(Problem("no machines are set", "options.ssh.hosts", "hosts: [{address: 10.0.0.5}]"))
        elif count > len(self.machines):
            message = f"is {count}, but options.ssh.hosts names {len(self.machines)}"
            problems.append(Problem(message, "num_nodes", "add machines, or lower num_nodes"))
        if problems:
            raise BadJob(problems)
        notes = gpu_notes(job, "its machine, of those that no other run holds")
        for own, machines, sharing in roles.on_own_machines(job) if job.roles else ():
            if sharing > 1 and own.resources.gpus:
                notes.append(
                    f"roles share {format_count(machines, 'machine')}, which need {own.resources.gpus} GPUs each: submit asks"
                    " nvidia-smi there before anything starts"
                )
        if len(self.machines) > count:
            notes.append(
                f"the first {count} of {len(self.machines)} machines in options.ssh.hosts that can be reached are used"
            )
        if count > 1 and job.output is None:
            notes.append(
                "`output` is not set: each node keeps its files on its own disk, and `fetch` copies those of all nodes"
            )
        request = self._request(job, manifest, bundle.sha256, output)
        return Plan.of(self.name, job, bundle, manifest.to_dict(), request, notes)

    def preflight(self, plan: Plan) -> None:
        check_installed()

    def _request(self, job: Job, manifest: Manifest, sha256: str, output: str | None) -> dict[str, Any]:
        """Return the machines, and what supervisors get: folder, command and environment; a node fills in its own part."""
        folder, of_nodes = self.attempt_folder(manifest.attempt_id), gpus_of_nodes(job)
        gpus = chosen_gpus(of_nodes[0])
        env = manifest.environment() | {
            "CLOUDTRAIN_HOST": "${node.address}",
            "CLOUDTRAIN_NODE_RANK": "${node.rank}",
            "CLOUDTRAIN_NUM_NODES": "${nodes}",
            "CLOUDTRAIN_NODE_DIR": f"{folder}/node-${{node.rank}}",
            "CLOUDTRAIN_RUN_DIR": f"{output or self.runs}/{manifest.run_id}",
            "CLOUDTRAIN_GPUS": gpus,  # only launchers in older bundles use the numbers
            "CLOUDTRAIN_UMASK": self.umask,
            "CLOUDTRAIN_STDIN": "1",
        }
        if manifest.nodes > 1:
            env["CLOUDTRAIN_CONTROL"] = "${node-0.control}"  # not for node 0 itself, which says it
        if gpus:
            env["CLOUDTRAIN_SHARED_GPUS"] = "1"
        by_node: dict[str, Any] = {}
        if "roles.colocate" in rules.keys_in_use(job):
            by_node["machines"] = roles.machines(job)
        if len(set(of_nodes)) > 1 or by_node:
            by_node["gpus"] = of_nodes
            env |= {"CLOUDTRAIN_GPUS": "${node.gpus}", "CLOUDTRAIN_SHARED_GPUS": "${node.shared}"}
        if any(of_nodes) and job.limits.max_wait_s is not None:
            env["CLOUDTRAIN_GPU_WAIT_S"] = str(job.limits.max_wait_s)
        if self.lease_s is not None:
            env["CLOUDTRAIN_LEASE_S"] = f"{self.lease_s:g}"
        return {
            "hosts": [machine.to_dict() for machine in self.machines],
            "nodes": manifest.nodes,
            **by_node,
            "folder": folder,
            "source": f"{self.root}/src/{sha256}.tar.gz",
            "argv": ["${node.python}", ".cloudtrain/launch.py"],
            "env": env,
        }

    def plan_after(self, plan: Plan, newest: int) -> Plan:
        return replace(plan, request={**plan.request, "files_of": newest}) if plan.manifest["output"] is None else plan

    def avoid(self, plan: Plan, names: Sequence[str]) -> Plan:
        """Return the plan with these machines last: they are used where the others are too few."""
        if len(plan.request["hosts"]) <= machine_count(plan):
            return plan
        hosts = sorted(plan.request["hosts"], key=lambda host: Machine({}, host).label in names)
        return replace(plan, request={**plan.request, "hosts": hosts})

    def time_limit(self, plan: Plan) -> TimeLimit:
        return TimeLimit.of_launcher(plan)

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        folder = str(plan.request["folder"])
        chosen = choose_machines(plan, self.root, lambda folder: self._find_requested(folder)[0])
        labels = [machine.label for machine, _ in chosen]
        deliver_source(plan, chosen, self.root, bundle)
        machines = [machine for machine, _ in chosen]
        check_shared_output(plan, machines)
        launch_input: dict[str, Any] = {"secrets": env_secrets(plan), "token": os.urandom(16).hex()}
        if len(machines) > 1:  # a submit that is finished by another needs the same word
            launch_input["token"] = machines[0].agent.ask("token", folder=folder).value
        handle = make_handle(labels, folder)
        try:
            started = launch_node(plan, machines, 0, None, launch_input)
            if len(machines) > 1 and started["control"]:  # otherwise node 0 ended already, and its state says why
                other_ranks = range(1, len(machines))
                raise_first(
                    call_all(
                        lambda rank: launch_node(plan, machines, rank, started["control"], launch_input),
                        other_ranks,
                    )
                )
        except Unreachable:
            raise
        except CloudtrainError as error:
            self._cancel_started(handle, error)
            raise
        return handle

    def _cancel_started(self, handle: str, error: CloudtrainError) -> None:
        """Cancel the nodes that were started before one was refused; raises Unreachable if that is not confirmed."""
        try:
            self.cancel(handle)
        except BackendError as unconfirmed:
            message = f"{error.message}; its other nodes may run: {unconfirmed.message}"
            raise Unreachable(message, error.hint) from None

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def find(self, attempt_id: str) -> str | None:
        return self._find_requested(self.attempt_folder(attempt_id))[0]

    def _find_requested(self, folder: str) -> tuple[str | None, list[str]]:
        """Return the handle of the attempt if it has begun, and all handles that were requested; raises BackendError.

        Nothing begins before the request is on every chosen machine. So if all machines of an attempt could be among those
        that do not answer, it is unknown whether it has begun, and this raises.
        """
        answers = call_all(lambda machine: machine.agent.ask("request", folder=folder).value, self.machines)
        requests = [answer for answer in answers if isinstance(answer, dict)]
        handles = dict.fromkeys(make_handle(request["hosts"], folder) for request in requests)
        handles_here = [handle for handle in handles if self.nodes(handle)]  # two: an interrupted submit chose anew
        failures = [answer for answer in answers if isinstance(answer, CloudtrainError)]
        min_nodes = min((int(request.get("least") or 1) for request in requests), default=1)
        unknown: list[Any] = failures if len(failures) >= min_nodes else []
        for handle in handles_here:
            attempt = self.nodes(handle)
            has_begun = call_all(lambda node: node.ask("begun", node=node.folder, timeout_s=START_S).value, attempt)
            if True in has_begun:  # where a node answers that it has not, submit starts it
                return (None if False in has_begun else handle), handles_here
            if has_begun[0] is not False:  # node 0 is started before the others
                unknown = [*unknown, *has_begun]
        raise_first(unknown)
        return None, handles_here

    def discard(self, attempt_id: str) -> None:
        for handle in self._find_requested(self.attempt_folder(attempt_id))[1]:
            self.end(handle)

    def absent(self, handle: str) -> str:
        return f"{handle} is not one of the machines in options.ssh.hosts"

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        """Return the statuses of attempts from one request to each of their machines, all at once.

        Left out are attempts on a machine that answers later than the others, or with an error.
        """
        attempts = {handle: nodes for handle in handles if (nodes := self.nodes(handle))}
        answers = collect_reports(list(attempts.values()), lease=self.lease_s is not None)
        found: dict[str, Status] = {}
        errors = []
        for handle, attempt in attempts.items():
            if all(node in answers for node in attempt):
                try:
                    found[handle] = directory.attempt_status(
                        attempt, [answers[node] for node in attempt], self.lost_after_s
                    )
                except BackendError as error:
                    errors.append(error)
        if not found:
            raise_first(errors)
        return found

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        at = self.node(handle, node)
        machine = next(machine for machine in self.machines if machine.label == at.label)
        line = python_line(machine.python, words, machine.setup)
        return Shell(client_argv(machine.host, line, stdin=stdin, terminal=terminal), host=machine.label)

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        attempt = self.nodes(handle)
        answers = call_all(lambda node: node.ask("request", folder=node.attempt).value, attempt)
        request = next((answer for answer in answers if isinstance(answer, dict)), None)
        if request is None:
            raise_first(answers)
            hint = "cloudtrain show RUN tells which attempts ran, and where"
            raise BackendError(
                f"{handle} does not exist: the attempt never started there, or its files were deleted", hint
            )
        run_dir = str(request["run_dir"])
        if not run_dir.startswith(f"{self.root}/runs/"):  # a path that all nodes share
            attempt = [next(node for node, answer in zip(attempt, answers, strict=True) if isinstance(answer, dict))]
        into.mkdir(parents=True, exist_ok=True)
        agents = [node.agent for node in attempt]
        missing: set[int] = set()
        for name in what:
            missing.update(common_folder.download_nodes(agents, f"{run_dir}/{name}", into / name))
        if missing:
            names = ", ".join(f"node {attempt[rank].rank} ({attempt[rank].label})" for rank in sorted(missing))
            raise Unreachable(
                f"{names} cannot be reached: {into} lacks its files, and has those of the other nodes",
                "fetch again once the machine can be reached: what is there is not copied again",
            )
        return into

    def check(self) -> list[Problem]:
        from cloudtrain.backends.ssh.doctor import check_machines

        if not self.machines:
            return [Problem("no machines are set", "options.ssh.hosts", "hosts: [{address: 10.0.0.5}]")]
        problems, self._checked = check_machines(
            [(machine.label, machine.agent, machine.internal) for machine in self.machines], self.root
        )
        return problems

    def checked_machines(self) -> dict[str, str]:
        return dict(self._checked)

    @classmethod
    def discover(cls) -> dict[str, Any]:
        from cloudtrain.backends.ssh.doctor import discover_hosts

        return discover_hosts()

    def nodes(self, handle: str) -> list[Node]:
        return attempt_nodes(self.machines, handle)

    def machines_with_runs(self) -> list[Agent]:
        return [machine.agent for machine in self.machines]

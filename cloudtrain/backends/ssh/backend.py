"""The SSH backend: runs jobs on your own machines, with one detached supervisor on each; installs nothing there.

The handle has the machines by node rank and the attempt's folder on them. The supervisors watch each other, so the job
needs no client while it runs: the client may sleep, exit or be replaced by another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import folders
from cloudtrain.backends.api import FETCHABLE, Backend, FoundAttempt, Paths, Plan, Shell, TimeLimit, Traits
from cloudtrain.backends.manifest import Manifest, chosen_gpus, env_secrets, gpu_notes
from cloudtrain.backends.ssh import status
from cloudtrain.backends.ssh.launch import START_S, check_shared_output, choose_machines, deliver_source, launch_node
from cloudtrain.backends.ssh.machines import (
    Machine,
    Node,
    attempt_nodes,
    make_handle,
    raise_first,
)
from cloudtrain.backends.ssh.request import build_request
from cloudtrain.backends.traits import HONOURED, NO_EFFECT
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, BadJob, CloudtrainError, Problem, Unreachable
from cloudtrain.events import LogLine, State, Status
from cloudtrain.nodes import common_folder, logs, paths
from cloudtrain.nodes.rpc import remote_log_reader
from cloudtrain.nodes.ssh import call_all
from cloudtrain.nodes.ssh_command import client_argv, python_line
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle


LEASE_S = 120.0  # with `lease: client`
LOST_AFTER_S = 600.0
TAIL_S = 0.2  # how often followed logs are asked for
DIRECTORY = "~/.cloudtrain"


KEYS = dict.fromkeys(("num_nodes", "min_nodes", "resources.accelerators", "secrets.env", "secrets.file"), HONOURED)
KEYS |= {"limits.max_wait": HONOURED}
KEYS |= dict.fromkeys(("resources.cpus", "resources.memory", "resources.disk_gb"), NO_EFFECT)


class SshBackend(Backend):
    """Runs jobs on machines that are reached over SSH."""

    name = "ssh"
    traits = Traits(Paths.NODES, KEYS, own_machines=True, client="asyncssh", shell=True)
    poll_s = 0.5
    calls_per_s = 2.0  # one call is one request to each machine
    logs_per_s = 20.0  # requests over connections that are open
    follow_s = TAIL_S
    lost_after_s: float = LOST_AFTER_S
    variables = ("SSH_AUTH_SOCK", "HOME", "PATH")  # PATH: of a ProxyCommand

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self.workdir = workdir
        self.root = str(options.get("directory") or DIRECTORY).rstrip("/")
        self.umask = paths.umask(options.get("share"))
        lease = str(options.get("lease") or "supervisors")
        self.lease_s = float(options.get("lease_s") or LEASE_S) if lease == "client" else None
        self.lost_after_s = float(options.get("lost_after_s") or LOST_AFTER_S)
        self.host_to_host = options.get("host_to_host") is not False
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
        if not self.machines:
            problems.append(Problem("no machines are set", "options.ssh.hosts", "hosts: [{address: 10.0.0.5}]"))
        elif manifest.nodes > len(self.machines):
            message = f"is {manifest.nodes}, but options.ssh.hosts names {len(self.machines)}"
            problems.append(Problem(message, "num_nodes", "add machines, or lower num_nodes"))
        if problems:
            raise BadJob(problems)
        notes = gpu_notes(job, "its machine, of those that no other run holds")
        if len(self.machines) > manifest.nodes:
            notes.append(
                f"the first {manifest.nodes} of {len(self.machines)} machines in options.ssh.hosts that can be reached are used"
            )
        if manifest.nodes > 1 and job.output is None:
            notes.append(
                "`output` is not set: each node keeps its files on its own disk, and `fetch` copies those of all nodes"
            )
        return Plan(
            backend=self.name,
            run_id=run_id,
            attempt=attempt,
            request={
                "hosts": [machine.to_dict() for machine in self.machines],
                **build_request(
                    manifest,
                    run_id,
                    attempt,
                    self.root,
                    bundle.sha256,
                    output,
                    self.lease_s,
                    chosen_gpus(job),
                    job.limits.max_wait_s if job.resources.gpus else None,
                    self.umask,
                ),
            },
            bundle=bundle.to_dict(),
            manifest=manifest.to_dict(),
            job=job.to_dict(),
            notes=tuple(notes),
        )

    def plan_after(self, plan: Plan, newest: int) -> Plan:
        return replace(plan, request={**plan.request, "files_of": newest}) if plan.manifest["output"] is None else plan

    def time_limit(self, plan: Plan) -> TimeLimit:
        return TimeLimit.of_launcher(plan)

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        folder = str(plan.request["folder"])
        chosen = choose_machines(plan, self.root, lambda folder: self._find_requested(folder)[0])
        labels = [machine.label for machine, _ in chosen]
        deliver_source(plan, chosen, self.root, bundle, self.host_to_host)
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
        run_id, _, number = attempt_id.rpartition("-a")
        return self._find_requested(f"{self.root}/runs/{run_id}/a{number}")[0]

    def _find_requested(self, folder: str) -> tuple[str | None, list[str]]:
        """Return the handle of the attempt if it has begun, and all handles that were requested; raises BackendError.

        Nothing begins before the request is on every chosen machine. So if all machines of an attempt could be among those
        that do not answer, it is unknown whether it has begun, and this raises.
        """
        answers = call_all(lambda machine: machine.agent.ask("request", folder=folder).value, self.machines)
        requests = [answer for answer in answers if isinstance(answer, dict)]
        handles = dict.fromkeys(make_handle(request["hosts"], folder) for request in requests)
        handles_here = [
            handle for handle in handles if self._attempt_nodes(handle)
        ]  # two: an interrupted submit chose anew
        failures = [answer for answer in answers if isinstance(answer, CloudtrainError)]
        min_nodes = min((int(request.get("least") or 1) for request in requests), default=1)
        unknown: list[Any] = failures if len(failures) >= min_nodes else []
        for handle in handles_here:
            attempt = self._attempt_nodes(handle) or []
            has_begun = call_all(lambda node: node.ask("begun", node=node.folder, timeout_s=START_S).value, attempt)
            if True in has_begun:  # where a node answers that it has not, submit starts it
                return (None if False in has_begun else handle), handles_here
            if has_begun[0] is not False:  # node 0 is started before the others
                unknown = [*unknown, *has_begun]
        raise_first(unknown)
        return None, handles_here

    def discard(self, attempt_id: str) -> None:
        run_id, _, number = attempt_id.rpartition("-a")
        for handle in self._find_requested(f"{self.root}/runs/{run_id}/a{number}")[1]:
            self.cancel(handle)
            attempt = self._attempt_nodes(handle) or []
            raise_first(call_all(lambda node: node.ask("end", node=node.folder, timeout_s=START_S), attempt))

    def labels(self, handle: str) -> dict[str, str]:
        attempt = self._attempt_nodes(handle) or []
        answers = call_all(lambda node: node.ask("request", folder=node.attempt).value, attempt)
        request = next((answer for answer in answers if isinstance(answer, dict)), None)
        if request is None:
            raise_first(answers)
        return dict((request or {}).get("labels") or {})

    def labelled(self, name: str, value: str, known: Container[str]) -> Iterator[FoundAttempt]:
        def ask(machine: Machine) -> list[FoundAttempt]:
            wanted = (name, value)
            return list(folders.labelled(machine.agent, self.root, "request.json", wanted, known, self.find))

        answers = call_all(ask, self.machines)
        yield from {each.attempt_id: each for found in answers if isinstance(found, list) for each in found}.values()
        raise_first(answers)

    def status(self, handle: str) -> Status:
        attempt = self._attempt_nodes(handle)
        if attempt is None:
            return Status(State.LOST, None, f"{handle} is not one of the machines in options.ssh.hosts")
        return status.attempt_status(attempt, self._reports(attempt), self.lost_after_s)

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        """Return the statuses of attempts from one request to each of their machines, all at once.

        Left out are attempts on a machine that answers later than the others, or with an error.
        """
        attempts = {handle: nodes for handle in handles if (nodes := self._attempt_nodes(handle))}
        answers = status.collect_reports(list(attempts.values()), lease=self.lease_s is not None)
        found: dict[str, Status] = {}
        errors = []
        for handle, attempt in attempts.items():
            if all(node in answers for node in attempt):
                try:
                    found[handle] = status.attempt_status(
                        attempt, [answers[node] for node in attempt], self.lost_after_s
                    )
                except BackendError as error:
                    errors.append(error)
        if not found:
            raise_first(errors)
        return found

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        attempt = self._attempt_nodes(handle) or []
        unread: set[int] = set()

        def ended() -> bool:
            try:
                return self.status(handle).state.final
            except Unreachable:
                return False  # the job continues without the client

        read = remote_log_reader([(node.agent, f"{node.folder}/log") for node in attempt], unread)
        yield from logs.merge(
            read, len(attempt), after=after, follow=follow, ended=ended, pause_s=TAIL_S, clock=self._clock
        )
        bound_s = min(status.CUT_OFF_S, self.lost_after_s)
        cut_off = [node for node in attempt if node.rank in unread and node.agent.remote.unreachable_s < bound_s]
        # An attempt that was lost with its node has no more lines; of any other the reader should know.
        if cut_off and status.merge_reports(attempt, self._reports(attempt), []).state is not State.LOST:
            raise Unreachable(f"the lines of node {cut_off[0].rank} are missing: {cut_off[0].label} cannot be reached")

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        attempt = self._attempt_nodes(handle) or []
        if node >= len(attempt):
            raise BackendError(f"there is no node {node}: they are counted from 0, and the last is {len(attempt) - 1}")
        machine = next(machine for machine in self.machines if machine.label == attempt[node].label)
        line = python_line(machine.python, words, machine.setup)
        return Shell(client_argv(machine.host, line, stdin=stdin, terminal=terminal), host=machine.label)

    def cancel(self, handle: str) -> None:
        attempt = self._attempt_nodes(handle) or []
        answers = call_all(lambda node: node.ask("cancel", folder=node.attempt, rank=node.rank), attempt)
        unreachable = [node for node, answer in zip(attempt, answers, strict=True) if isinstance(answer, Unreachable)]
        raise_first([answer for answer in answers if not isinstance(answer, Unreachable)])
        if unreachable:
            names = ", ".join(f"node {node.rank} ({node.label})" for node in unreachable)
            hint = "cancel again when the machine can be reached"
            if len(attempt) > 1:
                hint = f"it ends by itself within {status.CUT_OFF_S:g} s after the others, or cut off from them; else {hint}"
            raise Unreachable(
                f"{names} cannot be reached: cloudtrain does not know whether the job has ended there", hint
            )

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        attempt = self._attempt_nodes(handle) or []
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

    def remains(self, handle: str) -> dict[str, int | None]:
        attempt = self._attempt_nodes(handle) or []
        folder = attempt[0].attempt.rpartition("/")[0] if attempt else ""
        sizes: list[Any] = call_all(lambda node: node.ask("size", folder=folder).value, attempt)
        raise_first(sizes)
        return {f"{node.label}:{folder}": size for node, size in zip(attempt, sizes, strict=True) if size is not None}

    def remove(self, handle: str) -> None:
        attempt = self._attempt_nodes(handle) or []
        run = attempt[0].attempt.split("/")[-2] if attempt else ""
        raise_first(call_all(lambda node: node.ask("remove", runs=f"{self.root}/runs", run=run), attempt))

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

    def _reports(self, attempt: Sequence[Node]) -> list[Any]:
        return status.ask_reports(attempt, lease=self.lease_s is not None)

    def _attempt_nodes(self, handle: str) -> list[Node] | None:
        return attempt_nodes(self.machines, handle)

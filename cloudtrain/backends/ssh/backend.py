"""The SSH backend: runs jobs on your own machines, with one detached supervisor on each; installs nothing there.

The handle has the machines by node rank and the attempt's folder on them. The supervisors watch each other, so the job
needs no client while it runs: the client may sleep, exit or be replaced by another.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import FETCHABLE, Feature, Plan
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.ssh.machines import CUT_OFF_S, Machine, Node, merge_reports, read_reports
from cloudtrain.errors import BackendError, BadJob, CloudtrainError, Problem, Unreachable
from cloudtrain.events import LogLine, State, Status
from cloudtrain.nodes import directory, logs, paths, transfer
from cloudtrain.nodes.rpc import Answer, begin_each, remote_log_reader
from cloudtrain.nodes.ssh import call_all
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle


LEASE_S = 120.0  # with `lease: client`
LOST_AFTER_S = 600.0
START_S = 120.0  # for a supervisor, and for the end of what an earlier attempt left running
LATE_S = 2.0  # how long a machine may answer after the first one, where several are asked at once
TAIL_S = 0.2  # how often followed logs are asked for
DIRECTORY = "~/.cloudtrain"
_HANDLE = re.compile(r"(?P<labels>.+?):(?P<folder>[~/].*/runs/(?P<run>[^/]+)/a(?P<attempt>\d+))")


class SshBackend:
    """Runs jobs on machines that are reached over SSH."""

    name = "ssh"
    poll_s = 0.5
    calls_per_s = 2.0  # one call is one request to each machine
    follow_s = TAIL_S
    features = frozenset(
        {
            Feature.MULTI_NODE,
            Feature.MIN_NODES,
            Feature.ENV_SECRETS,
            Feature.FILE_SECRETS,
            Feature.LOCAL_PATHS,
            Feature.OBJECT_STORES,
        }
    )

    def __init__(self, options: Mapping[str, Any], workdir: Path) -> None:
        self.workdir = workdir
        self.root = str(options.get("directory") or DIRECTORY).rstrip("/")
        self.lease = str(options.get("lease") or "supervisors")
        self.lease_s = float(options.get("lease_s") or LEASE_S)
        self.lost_after_s = float(options.get("lost_after_s") or LOST_AFTER_S)
        self.machines = [Machine(dict(options), dict(host)) for host in options.get("hosts") or []]
        identity = [[machine.to_dict() for machine in self.machines], self.lease, self.lost_after_s]
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
            problems.append(Problem("no machine is named", "options.ssh.hosts", "hosts: [{address: 10.0.0.5}]"))
        elif manifest.nodes > len(self.machines):
            message = f"is {manifest.nodes}, but options.ssh.hosts names {len(self.machines)}"
            problems.append(Problem(message, "num_nodes", "name more machines, or ask for fewer nodes"))
        if problems:
            raise BadJob(problems)
        folder = f"{self.root}/runs/{run_id}/a{attempt}"
        gpus = manifest.gpus_per_node
        env = {f"CLOUDTRAIN_MANIFEST_{n}": piece for n, piece in enumerate(manifest.encode())}
        env |= {
            "CLOUDTRAIN_ATTEMPT_ID": manifest.attempt_id,
            "CLOUDTRAIN_HOST": "${node.address}",
            "CLOUDTRAIN_NODE_RANK": "${node.rank}",
            "CLOUDTRAIN_NUM_NODES": "${nodes}",
            "CLOUDTRAIN_NODE_DIR": f"{folder}/node-${{node.rank}}",
            "CLOUDTRAIN_RUN_DIR": f"{output or self.root + '/runs'}/{run_id}",
            "CLOUDTRAIN_GPUS": ",".join(map(str, range(gpus))),
            "CLOUDTRAIN_STDIN": "1",
        }
        if manifest.nodes > 1:
            env["CLOUDTRAIN_CONTROL"] = "${node-0.control}"  # not for node 0 itself, which says it
        if self.lease == "client":
            env["CLOUDTRAIN_LEASE_S"] = f"{self.lease_s:g}"
        notes = [] if gpus else ["no accelerators are asked for: the ranks see no GPU (resources.accelerators)"]
        if len(self.machines) > manifest.nodes:
            notes.append(f"the first {manifest.nodes} of {len(self.machines)} machines that answer are taken")
        if manifest.nodes > 1 and job.output is None:
            notes.append("the machines share no folder: checkpoints and results lie on node 0 (output)")
        return Plan(
            backend=self.name,
            run_id=run_id,
            attempt=attempt,
            request={
                "hosts": [machine.to_dict() for machine in self.machines],
                "nodes": manifest.nodes,
                "folder": folder,
                "source": f"{self.root}/src/{bundle.sha256}.tar.gz",
                "argv": ["${node.python}", ".cloudtrain/launch.py"],
                "env": env,
            },
            bundle=bundle.to_dict(),
            manifest=manifest.to_dict(),
            job=job.to_dict(),
            notes=tuple(notes),
        )

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        folder = str(plan.request["folder"])
        chosen = self._choose_machines(plan)
        labels = [machine.label for machine, _ in chosen]
        run_dir = plan.request["env"]["CLOUDTRAIN_RUN_DIR"]
        request = {"hosts": labels, "run_dir": run_dir, "labels": dict(plan.job["labels"]), "least": _min_nodes(plan)}
        request_json = json.dumps(request).encode()

        def ship(item: tuple[int, tuple[Machine, Mapping[str, Any]]]) -> None:
            rank, (machine, answer) = item
            if not answer["bundle"]:
                transfer.send_bundle(machine.agent, self.root, bundle)
            into = f"{folder}/node-{rank}/source"
            machine.agent.ask("extract", root=self.root, sha256=bundle.sha256, into=into, timeout_s=transfer.SEND_S)
            machine.agent.ask("write", request_json, path=f"{folder}/request.json")
            if rank == 0:
                machine.agent.ask("write", b"", path=f"{self.root}/runs/{plan.run_id}/first")

        _raise_first(call_all(ship, enumerate(chosen)))
        machines = [machine for machine, _ in chosen]
        self._check_shared_output(plan, machines)
        launch_input: dict[str, Any] = {"secrets": directory.env_secrets(plan.manifest), "token": os.urandom(16).hex()}
        if len(machines) > 1:  # a submit that is finished by another needs the same word
            launch_input["token"] = machines[0].agent.ask("token", folder=folder).value
        handle = _make_handle(labels, folder)
        try:
            started = self._launch_node(plan, machines, 0, None, launch_input)
            if len(machines) > 1 and started["control"]:  # otherwise node 0 ended already, and its state says why
                other_ranks = range(1, len(machines))
                _raise_first(
                    call_all(
                        lambda rank: self._launch_node(plan, machines, rank, started["control"], launch_input),
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

    def _choose_machines(self, plan: Plan) -> list[tuple[Machine, Mapping[str, Any]]]:
        """Return the machines by node rank, each with its answer to `prepare`; raises Unreachable if too few answer.

        Repeats the choice of an interrupted submit. Node 0 stays on the machine that has the run's checkpoints.
        """
        machines = [Machine({}, host) for host in plan.request["hosts"]]
        arguments = {"root": self.root, "run": plan.run_id, "attempt": plan.attempt, "sha256": plan.bundle["sha256"]}
        answers = call_all(lambda machine: machine.agent.ask("prepare", timeout_s=START_S, **arguments).value, machines)
        unreachable = {
            m.label: answer for m, answer in zip(machines, answers, strict=True) if isinstance(answer, CloudtrainError)
        }
        _raise_first([error for error in unreachable.values() if not isinstance(error, Unreachable)])
        prepared = {m.label: answer for m, answer in zip(machines, answers, strict=True) if isinstance(answer, dict)}
        earlier_choices = list(
            dict.fromkeys(tuple(answer["request"]["hosts"]) for answer in prepared.values() if answer["request"])
        )
        if len(earlier_choices) > 1:
            begun = self._find_requested(str(plan.request["folder"]))[0]
            earlier_choices = [
                hosts for hosts in earlier_choices if _make_handle(hosts, plan.request["folder"]) == begun
            ] or earlier_choices
        if earlier_choices:
            _raise_first([unreachable[label] for label in earlier_choices[0] if label in unreachable])
            return [(m, prepared[label]) for label in earlier_choices[0] for m in machines if m.label == label]
        available = [machine for machine in machines if machine.label in prepared]
        num_nodes, min_nodes = plan.request["nodes"], _min_nodes(plan)
        holders = [machine for machine in available if prepared[machine.label]["first"]]
        unshared = plan.attempt > 1 and plan.manifest["output"] is None
        if len(available) < min_nodes or (unshared and unreachable and not holders):
            errors = "; ".join(str(error) for error in unreachable.values())
            shortage = (
                f"{len(available)} of {num_nodes} nodes"
                if len(available) < min_nodes
                else "no node that may hold the checkpoints"
            )
            raise Unreachable(f"{shortage} can be had: {errors}", "the attempt begins when they answer")
        if unshared:
            available.sort(key=lambda machine: machine not in holders)
        return [(machine, prepared[machine.label]) for machine in available[:num_nodes]]

    def _check_shared_output(self, plan: Plan, machines: Sequence[Machine]) -> None:
        """Check that an output path is the same folder on all nodes, with a marker file; raises BackendError."""
        output, _ = paths.output_path(plan.manifest["output"])
        if output is None or len(machines) == 1:
            return
        marker_path, marker = f"{plan.request['env']['CLOUDTRAIN_RUN_DIR']}/.shared", os.urandom(8).hex().encode()
        machines[0].agent.ask("write", marker, path=marker_path)
        contents = call_all(lambda machine: machine.agent.ask("read", path=marker_path).data, machines[1:])
        _raise_first(contents)
        for machine, content in zip(machines[1:], contents, strict=True):
            if content != marker:
                raise BackendError(
                    f"the output {output} is not the same folder on {machine.label} and {machines[0].label}",
                    "name a folder that all machines share, or leave output out: node 0 keeps the results then",
                )

    def _launch_node(
        self, plan: Plan, machines: Sequence[Machine], rank: int, control: str | None, secrets: Mapping[str, Any]
    ) -> dict[str, Any]:
        machine = machines[rank]
        values = {"node.address": machine.internal, "node.rank": str(rank), "node.python": machine.python,
                  "nodes": str(len(machines)), "node-0.control": control or ""}  # fmt: skip

        def fill(text: str) -> str:
            return re.sub(r"\$\{([\w.-]+)\}", lambda match: values[match[1]], text)

        requested = {name: fill(text) for name, text in plan.request["env"].items()}
        env = {name: text for name, text in requested.items() if text or name != "CLOUDTRAIN_CONTROL"}
        node = f"{plan.request['folder']}/node-{rank}"
        argv = [fill(argument) for argument in plan.request["argv"]]
        launched = machine.agent.ask("launch", node=node, argv=argv, env=env, secrets=secrets, timeout_s=START_S)
        return dict(launched.value)

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
        handles = dict.fromkeys(_make_handle(request["hosts"], folder) for request in requests)
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
        _raise_first(unknown)
        return None, handles_here

    def discard(self, attempt_id: str) -> None:
        run_id, _, number = attempt_id.rpartition("-a")
        for handle in self._find_requested(f"{self.root}/runs/{run_id}/a{number}")[1]:
            self.cancel(handle)

    def labels(self, handle: str) -> dict[str, str]:
        attempt = self._attempt_nodes(handle) or []
        answers = call_all(lambda node: node.ask("request", folder=node.attempt).value, attempt)
        request = next((answer for answer in answers if isinstance(answer, dict)), None)
        if request is None:
            _raise_first(answers)
        return dict((request or {}).get("labels") or {})

    def status(self, handle: str) -> Status:
        attempt = self._attempt_nodes(handle)
        if attempt is None:
            return Status(State.LOST, None, f"{handle} names no machine of options.ssh.hosts")
        return self._status_from(attempt, self._reports(attempt))

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        """Return the statuses of attempts from one request to each of their machines, all at once.

        Left out are attempts on a machine that answers later than the others, or with an error.
        """
        from concurrent.futures import FIRST_COMPLETED, wait

        attempts = {handle: nodes for handle in handles if (nodes := self._attempt_nodes(handle))}
        by_machine: dict[str, list[Node]] = {}
        for node in chain.from_iterable(attempts.values()):
            by_machine.setdefault(node.label, []).append(node)
        futures = [(nodes, self._begin_reports(nodes)) for nodes in by_machine.values()]
        wait([future for _, future in futures], return_when=FIRST_COMPLETED)
        wait([future for _, future in futures], timeout=LATE_S)
        answers: dict[Node, Any] = {}
        for nodes, future in futures:
            if future.done():
                answers.update(zip(nodes, read_reports(nodes, future), strict=True))
        found: dict[str, Status] = {}
        errors = []
        for handle, attempt in attempts.items():
            if all(node in answers for node in attempt):
                try:
                    found[handle] = self._status_from(attempt, [answers[node] for node in attempt])
                except BackendError as error:
                    errors.append(error)
        if not found:
            _raise_first(errors)
        return found

    def _begin_reports(self, nodes: Sequence[Node]) -> Future[Answer]:
        """Ask a machine for the reports of several nodes in one request."""
        lease = self.lease == "client"
        arguments = [{"folder": node.attempt, "rank": node.rank, "lease": lease} for node in nodes]
        return begin_each(nodes[0].agent, "report", arguments)

    def _status_from(self, attempt: Sequence[Node], answers: Sequence[Any]) -> Status:
        """Return the status that the nodes' reports give; raises the first error of a node that answered."""
        for answer in answers:
            if isinstance(answer, CloudtrainError) and not isinstance(answer, Unreachable):
                raise answer
        unreachable = [node for node, answer in zip(attempt, answers, strict=True) if isinstance(answer, Unreachable)]
        reports = [answer for answer in answers if isinstance(answer, dict)]
        if not reports:
            if min(node.agent.remote.unreachable_s for node in unreachable) < self.lost_after_s:
                _raise_first(answers)
            return Status(State.LOST, None, f"{unreachable[0].label} was not reached for {self.lost_after_s:g} s")
        if all(answer["request"] is None for answer in reports):
            return Status(State.LOST, None, f"there is no attempt in {attempt[0].attempt}")
        return merge_reports(attempt, answers, unreachable)

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        attempt = self._attempt_nodes(handle) or []
        unread: set[int] = set()

        def ended() -> bool:
            try:
                return self.status(handle).state.final
            except Unreachable:
                return False  # the job continues without the client

        read = remote_log_reader([(node.agent, f"{node.folder}/log") for node in attempt], unread)
        yield from logs.merge(read, len(attempt), after=after, follow=follow, ended=ended, pause_s=TAIL_S)
        cut_off = [node for node in attempt if node.rank in unread and node.agent.remote.unreachable_s < CUT_OFF_S]
        # Of an attempt that was lost with its node nothing more can be had; of any other the reader should know.
        if cut_off and merge_reports(attempt, self._reports(attempt), []).state is not State.LOST:
            raise Unreachable(f"the lines of node {cut_off[0].rank} are missing: {cut_off[0].label} cannot be reached")

    def cancel(self, handle: str) -> None:
        attempt = self._attempt_nodes(handle) or []
        answers = call_all(lambda node: node.ask("cancel", folder=node.attempt, rank=node.rank), attempt)
        unreachable = [node for node, answer in zip(attempt, answers, strict=True) if isinstance(answer, Unreachable)]
        _raise_first([answer for answer in answers if not isinstance(answer, Unreachable)])
        if unreachable:
            names = ", ".join(f"node {node.rank} ({node.label})" for node in unreachable)
            hint = "cancel again when it can be reached"
            if len(attempt) > 1:
                hint = f"it ends by itself within {CUT_OFF_S:g} s after the others, or cut off from them; else {hint}"
            raise Unreachable(f"{names} cannot be reached: it is not known whether the job has ended there", hint)

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        attempt = self._attempt_nodes(handle)
        request = attempt[0].ask("request", folder=attempt[0].attempt).value if attempt else None
        if not attempt or not request:
            raise BackendError(f"there is no attempt at {handle}")
        into.mkdir(parents=True, exist_ok=True)
        for name in what:
            transfer.download_folder(attempt[0].agent, f"{request['run_dir']}/{name}", into / name)
        return into

    def check(self) -> list[Problem]:
        from cloudtrain.backends.ssh.doctor import check_machines

        if not self.machines:
            return [Problem("no machine is named", "options.ssh.hosts", "hosts: [{address: 10.0.0.5}]")]
        return check_machines(
            [(machine.label, machine.agent, machine.internal) for machine in self.machines], self.root
        )

    @classmethod
    def discover(cls) -> dict[str, Any]:
        """The hosts that ~/.ssh/config names."""
        try:
            text = Path("~/.ssh/config").expanduser().read_text()
        except (OSError, ValueError, RuntimeError):
            return {}
        names = [name for line in re.findall(r"(?im)^\s*host\s+(.+)$", text) for name in line.split()]
        hosts = [name for name in names if re.fullmatch(r"[\w.:-]+", name)]
        return {"hosts": [{"address": name} for name in dict.fromkeys(hosts)]} if hosts else {}

    def _reports(self, attempt: Sequence[Node]) -> list[Any]:
        lease = self.lease == "client"
        return call_all(
            lambda node: node.ask("report", folder=node.attempt, rank=node.rank, lease=lease).value, attempt
        )

    def _attempt_nodes(self, handle: str) -> list[Node] | None:
        """Return an attempt's nodes, or None if the handle is invalid or names other machines."""
        match = _HANDLE.fullmatch(handle)
        by_label = {machine.label: machine for machine in self.machines}
        labels = match["labels"].split(",") if match else []
        if not match or not all(label in by_label for label in labels):
            return None
        return [Node(by_label[label], rank, match["folder"]) for rank, label in enumerate(labels)]


def _min_nodes(plan: Plan) -> int:
    return int(plan.manifest["min_nodes"] or plan.request["nodes"])


def _make_handle(labels: Sequence[str], folder: str) -> str:
    return f"{','.join(labels)}:{folder}"


def _raise_first(answers: Sequence[Any]) -> None:
    """Raise the first error among answers: refusals before unreachable machines."""
    errors = [answer for answer in answers if isinstance(answer, CloudtrainError)]
    for error in sorted(errors, key=lambda error: isinstance(error, Unreachable)):
        raise error

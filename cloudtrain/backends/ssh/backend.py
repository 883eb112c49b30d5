"""Training on machines of one's own, over SSH: one supervisor on each, detached; nothing of cloudtrain is installed there.

The handle names the machines by node rank and the attempt's folder on them. The supervisors look after each other, so
that nothing here is needed while the job runs: a client may sleep, die or be replaced by another.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import FETCHABLE, Feature, Plan
from cloudtrain.backends.manifest import Manifest
from cloudtrain.errors import BackendError, BadJob, CloudtrainError, Problem, Unreachable
from cloudtrain.events import LogLine, State, Status
from cloudtrain.nodes import directory, logs, paths, ssh, transfer
from cloudtrain.nodes.rpc import RemoteAgent, remote_log_reader
from cloudtrain.nodes.ssh import call_all
from cloudtrain.source import provenance

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

CUT_OFF_S = 15.0  # by then a node that the others do not hear has ended itself
LEASE_S = 120.0  # with `lease: client`
LOST_AFTER_S = 600.0
START_S = 120.0  # for a supervisor, and for the end of what an earlier attempt left running
TAIL_S = 0.2  # how often followed logs are asked for
DIRECTORY = "~/.cloudtrain"
_HANDLE = re.compile(r"(?P<labels>.+?):(?P<folder>[~/].*/runs/(?P<run>[^/]+)/a(?P<attempt>\d+))")


class SshBackend:
    """Runs jobs on machines that are reached over SSH."""

    name = "ssh"
    poll_s = 0.5
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
        self.machines = [_Machine(dict(options), dict(host)) for host in options.get("hosts") or []]

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
            said = f"is {manifest.nodes}, but options.ssh.hosts names {len(self.machines)}"
            problems.append(Problem(said, "num_nodes", "name more machines, or ask for fewer nodes"))
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
        chosen = self._choose(plan)
        labels = [machine.label for machine, _ in chosen]
        run_dir = plan.request["env"]["CLOUDTRAIN_RUN_DIR"]
        request = {"hosts": labels, "run_dir": run_dir, "labels": dict(plan.job["labels"]), "least": _least(plan)}
        written = json.dumps(request).encode()

        def ship(item: tuple[int, tuple[_Machine, Mapping[str, Any]]]) -> None:
            rank, (machine, found) = item
            if not found["bundle"]:
                transfer.send_bundle(machine.agent, self.root, bundle)
            into = f"{folder}/node-{rank}/source"
            machine.agent.ask("extract", root=self.root, sha256=bundle.sha256, into=into, timeout_s=transfer.SEND_S)
            machine.agent.ask("write", written, path=f"{folder}/request.json")
            if rank == 0:
                machine.agent.ask("write", b"", path=f"{self.root}/runs/{plan.run_id}/first")

        _raise(call_all(ship, enumerate(chosen)))
        machines = [machine for machine, _ in chosen]
        self._check_shared(plan, machines)
        given: dict[str, Any] = {"secrets": directory.env_secrets(plan.manifest), "token": os.urandom(16).hex()}
        if len(machines) > 1:  # a submit that is finished by another needs the same word
            given["token"] = machines[0].agent.ask("token", folder=folder).value
        handle = _handle(labels, folder)
        try:
            started = self._launch(plan, machines, 0, None, given)
            if len(machines) > 1 and started["control"]:  # otherwise node 0 ended already, and its state says why
                rest = range(1, len(machines))
                _raise(call_all(lambda rank: self._launch(plan, machines, rank, started["control"], given), rest))
        except Unreachable:
            raise
        except CloudtrainError as error:
            self._take_back(handle, error)
            raise
        return handle

    def _take_back(self, handle: str, error: CloudtrainError) -> None:
        """End the nodes that were started before one was refused; raises Unreachable where that is not confirmed."""
        try:
            self.cancel(handle)
        except BackendError as unconfirmed:
            said = f"{error.message}; its other nodes may run: {unconfirmed.message}"
            raise Unreachable(said, error.hint) from None

    def _choose(self, plan: Plan) -> list[tuple[_Machine, Mapping[str, Any]]]:
        """Return the machines by node rank, each with what lies there; raises Unreachable when too few answer.

        What an interrupted submit chose is chosen again. Node 0 stays where the run's checkpoints are.
        """
        machines = [_Machine({}, host) for host in plan.request["hosts"]]
        run = {"root": self.root, "run": plan.run_id, "attempt": plan.attempt, "sha256": plan.bundle["sha256"]}
        answers = call_all(lambda machine: machine.agent.ask("prepare", timeout_s=START_S, **run).value, machines)
        silent = {m.label: said for m, said in zip(machines, answers, strict=True) if isinstance(said, CloudtrainError)}
        _raise([error for error in silent.values() if not isinstance(error, Unreachable)])
        found = {m.label: said for m, said in zip(machines, answers, strict=True) if isinstance(said, dict)}
        before = list(dict.fromkeys(tuple(said["request"]["hosts"]) for said in found.values() if said["request"]))
        if len(before) > 1:
            begun = self._find(str(plan.request["folder"]))[0]
            before = [hosts for hosts in before if _handle(hosts, plan.request["folder"]) == begun] or before
        if before:
            _raise([silent[label] for label in before[0] if label in silent])
            return [(m, found[label]) for label in before[0] for m in machines if m.label == label]
        here = [machine for machine in machines if machine.label in found]
        wanted, least = plan.request["nodes"], _least(plan)
        first = [machine for machine in here if found[machine.label]["first"]]
        kept_apart = plan.attempt > 1 and plan.manifest["output"] is None
        if len(here) < least or (kept_apart and silent and not first):
            why = "; ".join(str(error) for error in silent.values())
            what = f"{len(here)} of {wanted} nodes" if len(here) < least else "no node that may hold the checkpoints"
            raise Unreachable(f"{what} can be had: {why}", "the attempt begins when they answer")
        if kept_apart:
            here.sort(key=lambda machine: machine not in first)
        return [(machine, found[machine.label]) for machine in here[:wanted]]

    def _check_shared(self, plan: Plan, machines: Sequence[_Machine]) -> None:
        """Refuse an output that is a path, but not the same folder on all nodes; raises BackendError."""
        output, _ = paths.output_path(plan.manifest["output"])
        if output is None or len(machines) == 1:
            return
        mark, word = f"{plan.request['env']['CLOUDTRAIN_RUN_DIR']}/.shared", os.urandom(8).hex().encode()
        machines[0].agent.ask("write", word, path=mark)
        found = call_all(lambda machine: machine.agent.ask("read", path=mark).data, machines[1:])
        _raise(found)
        for machine, seen in zip(machines[1:], found, strict=True):
            if seen != word:
                raise BackendError(
                    f"the output {output} is not the same folder on {machine.label} and {machines[0].label}",
                    "name a folder that all machines share, or leave output out: node 0 keeps the results then",
                )

    def _launch(
        self, plan: Plan, machines: Sequence[_Machine], rank: int, control: str | None, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        machine = machines[rank]
        values = {"node.address": machine.internal, "node.rank": str(rank), "node.python": machine.python,
                  "nodes": str(len(machines)), "node-0.control": control or ""}  # fmt: skip

        def real(text: str) -> str:
            return re.sub(r"\$\{([\w.-]+)\}", lambda found: values[found[1]], text)

        requested = {name: real(text) for name, text in plan.request["env"].items()}
        env = {name: text for name, text in requested.items() if text or name != "CLOUDTRAIN_CONTROL"}
        node = f"{plan.request['folder']}/node-{rank}"
        argv = [real(word) for word in plan.request["argv"]]
        launched = machine.agent.ask("launch", node=node, argv=argv, env=env, secrets=given, timeout_s=START_S)
        return dict(launched.value)

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def find(self, attempt_id: str) -> str | None:
        run_id, _, number = attempt_id.rpartition("-a")
        return self._find(f"{self.root}/runs/{run_id}/a{number}")[0]

    def _find(self, folder: str) -> tuple[str | None, list[str]]:
        """Return the handle of an attempt that has begun, and those of all that were requested; raises BackendError.

        Nothing begins before the request lies on every machine that was chosen. So what answers proves nothing about an
        attempt all of whose machines may be silent: it is not known then whether it has begun.
        """
        answers = call_all(lambda machine: machine.agent.ask("request", folder=folder).value, self.machines)
        known = [answer for answer in answers if isinstance(answer, dict)]
        handles = dict.fromkeys(_handle(request["hosts"], folder) for request in known)
        requested = [handle for handle in handles if self._attempt(handle)]  # two: an interrupted submit chose anew
        silent = [answer for answer in answers if isinstance(answer, CloudtrainError)]
        least = min((int(request.get("least") or 1) for request in known), default=1)
        unknown: list[Any] = silent if len(silent) >= least else []
        for handle in requested:
            attempt = self._attempt(handle) or []
            begun = call_all(lambda node: node.ask("begun", node=node.folder, timeout_s=START_S).value, attempt)
            if True in begun:  # where a node answers that it has not, submit starts it
                return (None if False in begun else handle), requested
            if begun[0] is not False:  # node 0 is started before the others
                unknown = [*unknown, *begun]
        _raise(unknown)
        return None, requested

    def discard(self, attempt_id: str) -> None:
        run_id, _, number = attempt_id.rpartition("-a")
        for requested in self._find(f"{self.root}/runs/{run_id}/a{number}")[1]:
            self.cancel(requested)

    def labels(self, handle: str) -> dict[str, str]:
        attempt = self._attempt(handle) or []
        answers = call_all(lambda node: node.ask("request", folder=node.attempt).value, attempt)
        request = next((answer for answer in answers if isinstance(answer, dict)), None)
        if request is None:
            _raise(answers)
        return dict((request or {}).get("labels") or {})

    def status(self, handle: str) -> Status:
        attempt = self._attempt(handle)
        if attempt is None:
            return Status(State.LOST, None, f"{handle} names no machine of options.ssh.hosts")
        answers = self._reports(attempt)
        for answer in answers:
            if isinstance(answer, CloudtrainError) and not isinstance(answer, Unreachable):
                raise answer
        silent = [node for node, answer in zip(attempt, answers, strict=True) if isinstance(answer, Unreachable)]
        known = [answer for answer in answers if isinstance(answer, dict)]
        if not known:
            if min(node.agent.remote.unreachable_s for node in silent) < self.lost_after_s:
                _raise(answers)
            return Status(State.LOST, None, f"{silent[0].label} was not reached for {self.lost_after_s:g} s")
        if all(answer["request"] is None for answer in known):
            return Status(State.LOST, None, f"there is no attempt in {attempt[0].attempt}")
        return _merged(attempt, answers, silent)

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        attempt = self._attempt(handle) or []
        missing: set[int] = set()

        def ended() -> bool:
            try:
                return self.status(handle).state.final
            except Unreachable:
                return False  # the job goes on without us

        read = remote_log_reader([(node.agent, f"{node.folder}/log") for node in attempt], missing)
        yield from logs.merge(read, len(attempt), after=after, follow=follow, ended=ended, pause_s=TAIL_S)
        late = [node for node in attempt if node.rank in missing and node.agent.remote.unreachable_s < CUT_OFF_S]
        # Of an attempt that was lost with its node nothing more can be had; of any other the reader should know.
        if late and _merged(attempt, self._reports(attempt), []).state is not State.LOST:
            raise Unreachable(f"the lines of node {late[0].rank} are missing: {late[0].label} cannot be reached")

    def cancel(self, handle: str) -> None:
        attempt = self._attempt(handle) or []
        answers = call_all(lambda node: node.ask("cancel", folder=node.attempt, rank=node.rank), attempt)
        silent = [node for node, answer in zip(attempt, answers, strict=True) if isinstance(answer, Unreachable)]
        _raise([answer for answer in answers if not isinstance(answer, Unreachable)])
        if silent:
            names = ", ".join(f"node {node.rank} ({node.label})" for node in silent)
            hint = "cancel again when it can be reached"
            if len(attempt) > 1:
                hint = f"it ends by itself within {CUT_OFF_S:g} s after the others, or cut off from them; else {hint}"
            raise Unreachable(f"{names} cannot be reached: nobody can say whether the job has ended there", hint)

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        attempt = self._attempt(handle)
        request = attempt[0].ask("request", folder=attempt[0].attempt).value if attempt else None
        if not attempt or not request:
            raise BackendError(f"there is no attempt at {handle}")
        into.mkdir(parents=True, exist_ok=True)
        for name in what:
            transfer.download_folder(attempt[0].agent, f"{request['run_dir']}/{name}", into / name)
        return into

    def check(self) -> list[Problem]:
        from cloudtrain.backends.ssh.doctor import inspect

        if not self.machines:
            return [Problem("no machine is named", "options.ssh.hosts", "hosts: [{address: 10.0.0.5}]")]
        return inspect([(machine.label, machine.agent, machine.internal) for machine in self.machines], self.root)

    @classmethod
    def discover(cls) -> dict[str, Any]:
        """The hosts that ~/.ssh/config names."""
        try:
            text = Path("~/.ssh/config").expanduser().read_text()
        except (OSError, ValueError, RuntimeError):
            return {}
        names = [name for line in re.findall(r"(?im)^\s*host\s+(.+)$", text) for name in line.split()]
        plain = [name for name in names if re.fullmatch(r"[\w.:-]+", name)]
        return {"hosts": [{"address": name} for name in dict.fromkeys(plain)]} if plain else {}

    def _reports(self, attempt: Sequence[_Node]) -> list[Any]:
        lease = self.lease == "client"
        return call_all(
            lambda node: node.ask("report", folder=node.attempt, rank=node.rank, lease=lease).value, attempt
        )

    def _attempt(self, handle: str) -> list[_Node] | None:
        """Return an attempt's nodes, or None for what is no handle over these machines."""
        found = _HANDLE.fullmatch(handle)
        by_label = {machine.label: machine for machine in self.machines}
        labels = found["labels"].split(",") if found else []
        if not found or not all(label in by_label for label in labels):
            return None
        return [_Node(by_label[label], rank, found["folder"]) for rank, label in enumerate(labels)]


class _Machine:
    """One machine of the options, each value its own or the one for all."""

    def __init__(self, options: dict[str, Any], own: dict[str, Any]) -> None:
        def value(name: str) -> Any:
            return own.get(name) if own.get(name) is not None else options.get(name)

        self.host = ssh.Host(
            own["address"],
            value("port"),
            value("user"),
            value("jump"),
            value("identity"),
            value("known_hosts"),
        )
        self.label = self.host.label
        self.internal = str(own.get("internal") or own["address"])  # where the other nodes see it
        self.python = str(value("python") or "python3")
        self.setup = tuple(value("setup") or ())
        self.agent = RemoteAgent(self.host, self.python, self.setup)

    def to_dict(self) -> dict[str, Any]:
        given = {
            name: getattr(self.host, name) for name in ("address", "port", "user", "jump", "identity", "known_hosts")
        }
        given |= {"internal": self.internal, "python": self.python, "setup": list(self.setup)}
        return {name: value for name, value in given.items() if value not in (None, [])}


class _Node:
    """A machine as one node of an attempt."""

    def __init__(self, machine: _Machine, rank: int, attempt: str) -> None:
        self.label, self.agent, self.rank, self.attempt = machine.label, machine.agent, rank, attempt
        self.folder = f"{attempt}/node-{rank}"
        self.ask = machine.agent.ask


def _merged(attempt: Sequence[_Node], answers: Sequence[Any], silent: Sequence[_Node]) -> Status:
    """Return an attempt's state from what its nodes report, of which some are silent.

    The supervisors hear each other, so that those who answer know of the others: as long as one of them goes on, so
    does the attempt. When they have ended, a silent one has ended with them after CUT_OFF_S, or will be lost with them.
    """
    said = [(rank, answer["state"]) for rank, answer in enumerate(answers) if isinstance(answer, dict)]
    known: list[tuple[Mapping[str, Any] | None, Status | None]] = [
        (found["raw"] if found else None, directory.to_status(found)) for _, found in said
    ]
    ended = [pair for pair in known if pair[1] is not None and pair[1].state.final]
    if ended and len(ended) + sum(status is None for _, status in known) == len(known):
        # A node that was never started shares the end of those that were waiting for it.
        if any(node.agent.remote.unreachable_s < CUT_OFF_S for node in silent):
            return Status(State.STOPPING, reason=f"{silent[0].label} cannot be reached")
        return directory.merge_statuses(ended)
    status = directory.merge_statuses(known)
    if silent and status.state in (State.QUEUED, State.STARTING):
        return Status(State.STARTING, reason=f"{silent[0].label} cannot be reached")
    return status


def _least(plan: Plan) -> int:
    return int(plan.manifest["min_nodes"] or plan.request["nodes"])


def _handle(labels: Sequence[str], folder: str) -> str:
    return f"{','.join(labels)}:{folder}"


def _raise(answers: Sequence[Any]) -> None:
    """Raise the first error among answers: a refusal before a machine that does not answer."""
    errors = [answer for answer in answers if isinstance(answer, CloudtrainError)]
    for error in sorted(errors, key=lambda error: isinstance(error, Unreachable)):
        raise error

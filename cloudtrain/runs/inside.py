"""Programs inside a run that runs: on which node, in which attempt, and the event of each use."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import manifest, shell
from cloudtrain.backends.api import Backend, Shell
from cloudtrain.errors import BackendError, BadRequest
from cloudtrain.events import State
from cloudtrain.history import audit
from cloudtrain.runs.planning import attempts, output_audit

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.runs.run import Run

KINDS = ("exec", "stack", "forward")  # of events


@dataclass(frozen=True)
class Inside:
    """The newest attempt of a run that runs, and its backend."""

    run: Run
    attempt: AttemptRecord
    backend: Backend

    @classmethod
    def of(cls, run: Run) -> Inside:
        """Return the inside of a run; blocking. Raises BadRequest where it does not run, or its backend cannot do this."""
        status = run.refresh(lambda _: None)
        attempt = run.attempts[-1]
        if run.record.attached:
            raise BadRequest(f"{run.run_id} was submitted from another machine: only its outputs can be read here")
        if status.state.final:
            raise BadRequest(
                f"{run.run_id} has ended ({status.state}): no process of it is left", f"cloudtrain logs {run.run_id}"
            )
        if attempt.handle is None or status.state is State.QUEUED:
            raise BadRequest(f"{run.run_id} has not started yet ({status.state})", f"cloudtrain show {run.run_id}")
        backend = attempts.backend_of(attempt.plan, run.store.home, attempt.handle, clock=run.store.clock)
        if not backend.traits.shell:
            raise BadRequest(f"{run.run_id} runs on {backend.name}, which cannot start a program beside a rank")
        return cls(run, attempt, backend)

    @property
    def nodes(self) -> int:
        """How many nodes were asked for; with min_nodes fewer may run."""
        return int(self.attempt.plan.manifest["nodes"])

    def node_of(self, node: int | None, rank: int | None) -> int:
        """Return the node on which a rank runs; raises BadRequest where there is no such node or rank."""
        ranks_per_node = int(self.attempt.plan.manifest["processes_per_node"])
        if rank is not None and rank >= self.nodes * ranks_per_node:
            count = self.nodes * ranks_per_node
            raise BadRequest(f"there is no rank {rank}: they are counted from 0, and the last is {count - 1}")
        found = node if node is not None else (rank or 0) // ranks_per_node
        if found >= self.nodes:
            raise BadRequest(f"there is no node {found}: they are counted from 0, and the last is {self.nodes - 1}")
        return found

    def program(self, what: str, node: int, *words: str, stdin: bool = False, terminal: bool = False) -> Shell:
        """Return how a program of cloudtrain.nodes.inside is started on a node; raises BackendError."""
        assert self.attempt.handle is not None
        arguments = shell.program(what, self.attempt.attempt_id, node, *words)
        return self.backend.shell(self.attempt.handle, node, arguments, stdin=stdin, terminal=terminal)

    def connection(self, node: int, port: int) -> Shell:
        """Return what copies its input and output to and from a port of a node; blocking. Raises BackendError."""
        assert self.attempt.handle is not None
        connection = self.backend.connect(self.attempt.handle, node, port)
        return connection or self.program("connect", node, str(port), stdin=True)

    def record(self, kind: str, **data: Any) -> None:
        """Add the event of a use to the run: by whom, and what, with secrets masked."""
        if self.run.store.database.read_only:
            return
        try:
            who = f"{getpass.getuser()}@{socket.gethostname()}"
        except (OSError, KeyError):  # a container's user without a name
            who = socket.gethostname()
        node = f"node {data['on']}" if "on" in data else ""  # what was run is in the run's event, masked
        home, target = self.run.store.home, self.attempt.plan.target or self.attempt.plan.backend
        row = audit.append(home, kind, self.run.run_id, attempt=self.attempt.number, target=target, detail=node)
        with output_audit.copied(home, self.attempt.plan.job, row):
            pass
        self.run.store.add_event(self.attempt.attempt_id, kind, {"by": who, **data})

    def masked(self, argv: Sequence[str]) -> list[str]:
        """Return a command without the values of the job's secrets, and without what looks like a credential."""
        from cloudtrain.source.node_code import module
        from cloudtrain.source.secrets import search

        masks = module("launcher.masks").Masks()
        masks.hide(*manifest.env_secrets(self.attempt.plan).values())
        shown, option = [], ""
        for word in argv:
            text = masks.apply(word.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")
            found = search(f"{option}={word}".encode("utf-8", "surrogateescape"))
            shown.append("***" if found else text)
            option = word if word.startswith("-") and "=" not in word else ""
        return shown

    def stacks(self) -> Iterator[tuple[int, list[Mapping[str, Any]], str]]:
        """Yield each node with what its ranks do, and why there is nothing of it; blocking. All nodes are asked at once."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(self.nodes, 32)) as pool:
            for node, (rows, why) in enumerate(pool.map(self._stacks_of, range(self.nodes))):
                yield node, rows, why

    def _stacks_of(self, node: int) -> tuple[list[Mapping[str, Any]], str]:
        try:
            program = self.program("stack", node)
            if not program.argv and program.stream is None:
                return [], describe(program)
            done = shell.call(program)
        except BackendError as error:
            return [], error.message
        rows: list[Mapping[str, Any]] = []
        for line in done.out.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a banner of the machine's
            if isinstance(row, dict) and "rank" in row:
                rows.append(row)
        why = program.failure(done.code, done.err) if done.code else ""
        return rows, why


def describe(program: Shell) -> str:
    """Return what a person can do where no program can be started from here."""
    return f"{program.address}\n{program.note}".strip()

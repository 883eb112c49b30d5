"""Programs inside a run that runs, with the event of each use, and connections of this machine to a port of a node."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import manifest, shell
from cloudtrain.backends.api import Backend, Shell
from cloudtrain.errors import BackendError, BadRequest, CloudtrainError
from cloudtrain.events import State
from cloudtrain.history import audit
from cloudtrain.runs.planning import attempts

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.runs.run import Run

KINDS = ("exec", "stack", "forward")  # of events
PIECE = 1 << 16
LOOPBACK = "127.0.0.1"  # no other address: what listens in a run asks for no password


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

    def node_of(self, node: int | None, rank: int | None, role: str | None = None) -> int:
        """Return the node on which a rank runs; raises BadRequest where there is no such node, rank or role.

        Args:
            node: counted over all nodes, those of the main role first.
            rank: one of the role's; without a role, of the main one's.
            role: without a node and a rank, its first node.
        """
        plan = self.attempt.plan
        program: Mapping[str, Any] = next((each for each in plan.manifest.get("roles", ()) if each["name"] == role), {})
        nodes = plan.nodes_of(role) if role is not None else list(range(plan.main_nodes))
        ranks_per_node = int({**plan.manifest, **program}["processes_per_node"])
        count = len(nodes) * ranks_per_node
        if rank is not None and rank >= count:
            raise BadRequest(f"there is no rank {rank}: they are counted from 0, and the last is {count - 1}")
        found = node if node is not None else nodes[(rank or 0) // ranks_per_node]
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
        node = f"node {data['on']}" if "on" in data else ""  # what was run is in the run's event, masked
        home, target = self.run.store.home, self.attempt.plan.target or self.attempt.plan.backend
        row = audit.append(home, kind, self.run.run_id, attempt=self.attempt.number, target=target, detail=node)
        with audit.copied(home, self.attempt.plan.job, row):
            pass
        self.run.store.add_event(self.attempt.attempt_id, kind, {"by": row["who"], **data})

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


class Forward:
    """Listens on a port of 127.0.0.1 and connects whoever comes to a port of a node.

    Args:
        connect: returns the program that is connected to the port, with standard input; called in threads.
        complain: called in threads with why a connection failed.
        local: the port here; 0 takes any that is free.
    """

    def __init__(self, connect: Callable[[], Shell], complain: Callable[[str], None], local: int) -> None:
        self._connect, self._complain = connect, complain
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((LOOPBACK, local))
        except OSError as error:
            self._listener.close()
            raise BadRequest(
                f"port {local} of this machine cannot be used: {error.strerror}",
                "write PORT:0 to use any free port of this machine",
            ) from None
        self._listener.listen(64)
        self.port = int(self._listener.getsockname()[1])
        self._programs: set[subprocess.Popen[bytes]] = set()

    def serve(self) -> None:
        """Serve connections until this is interrupted, or closed; blocking."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Listen no more, and end all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for program in list(self._programs):
            program.terminate()

    def _serve_one(self, connection: socket.socket) -> None:
        with connection:
            try:
                program = self._connect()
                if program.stream is not None:
                    self._copy_stream(program, connection)
                else:
                    self._copy_process(program, connection)
            except CloudtrainError as error:
                self._complain(error.message)
            except OSError:
                pass  # who came has gone

    def _copy_stream(self, program: Shell, connection: socket.socket) -> None:
        assert program.stream is not None
        read, write = os.pipe()
        with os.fdopen(read, "rb") as errors:
            try:
                code = program.stream(connection.fileno(), connection.fileno(), write, False)
            finally:
                os.close(write)
            self._check(program, code, errors.read())

    def _copy_process(self, program: Shell, connection: socket.socket) -> None:
        process = subprocess.Popen(
            program.argv,
            stdin=connection.fileno(),
            stdout=connection.fileno(),
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends this process, which ends the connections
        )
        self._programs.add(process)
        try:
            assert process.stderr is not None
            errors = process.stderr.read()
            self._check(program, process.wait(), errors)
        finally:
            self._programs.discard(process)

    def _check(self, program: Shell, code: int, errors: bytes) -> None:
        if code > 0:
            self._complain(program.failure(code, errors))

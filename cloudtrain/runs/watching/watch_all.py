"""The watcher of a home: one process for all its runs on this host, elected by a lease in the history.

    python -m cloudtrain.runs.watching.watch_all HOME        the first runs, with their environments, as JSON on standard input

A process that loses the election hands its runs to the winner. A newer cloudtrain asks an older one for its runs and takes
its place. The watcher takes over the runs whose watcher on this host has died, and ends when no run has been live for
LINGER_S. Environments are only in its memory.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import CloudtrainError, StoreError
from cloudtrain.events import State, Status
from cloudtrain.history.file import identity
from cloudtrain.history.leases import EnvironmentRecord
from cloudtrain.history.store import Store
from cloudtrain.history.trials import SweepHistory
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import environment
from cloudtrain.runs.sending import handover, watch_log
from cloudtrain.runs.sending.handover import Mailbox, Message
from cloudtrain.runs.watching.scheduler import Multiplexer
from cloudtrain.runs.watching.watch import LEASE_S, NOTICE_S, send_next
from cloudtrain.runs.watching.workers import Worker

LINGER_S = 2.0  # without a live run
ORPHANS_S = 2.0  # how often runs are looked for whose watcher has died
ELECTION_S = LEASE_S + 15.0  # for a watcher that hangs to lose its lease
LAST_S = 0.1  # how long a watcher that ends waits for a last run
Environ = dict[str, str]


class HomeWatcher:
    """Watches all runs of a home on this host that were handed to it, or whose watcher has died."""

    def __init__(self, home: Path, shell: Environ, clock: Clock = SYSTEM) -> None:
        self.home, self._shell = home, shell
        self.me = Process.here()
        self.store = Store(home, clock)
        self._runs = Multiplexer(home, self.me, self._ended, clock)
        self._environs: dict[str, Environ] = {}
        self._own = dict(os.environ)
        self._workers: list[Worker] = []
        self._mailbox: Mailbox | None = None
        self._replaced = False
        self._sweeps = SweepHistory(home, clock)
        self._sweeping = False
        self._elected_at = self._live_at = self._orphans_at = 0.0
        self._history = identity(self.store.database.path)

    def run(self, messages: Sequence[Message]) -> None:
        """Watch until no run is live, another process is elected, or the history is gone; blocking."""
        while self.win(list(messages)):
            while self.step(1.0):
                pass
            messages = self.leave()
            if not messages:
                return

    def leave(self) -> list[Message]:
        """Give up the election and the runs; return those that have come at the last moment, to be elected again."""
        self.store.resign(self.me)
        if self._mailbox:
            self._mailbox.close()
        messages: list[Message] = []
        if not (self._is_gone() or self._replaced):
            self._runs.turn(LAST_S)
            messages = self._known_runs()
        self._runs.release()
        return messages

    def _known_runs(self) -> list[Message]:
        return [{"do": "watch", "run": run_id, "environ": environ, "own": True, "sources": []}
                for run_id, environ in self._environs.items()]  # fmt: skip

    # -- the election -------------------------------------------------------------------------------------------------

    def win(self, messages: list[Message]) -> bool:
        """Get elected and take the runs, or hand them to the winner and return False."""
        end = self.store.clock.monotonic() + ELECTION_S
        while self.store.clock.monotonic() < end:
            name = f"{os.uname().nodename}-{os.getpid()}.sock"
            self._mailbox = Mailbox(self.home / "watcher", name, self._receive)
            holder = self.store.elect(self.me, handover.own_version(), str(self._mailbox.path), LEASE_S)
            if holder.owner == str(self.me):
                self._elected_at = self._live_at = self.store.clock.monotonic()
                (self.home / handover.STARTING).unlink(missing_ok=True)
                for message in messages:
                    self._watch(message)
                return True
            self._mailbox.close()
            if handover.is_newer(handover.own_version(), holder.version):
                answer = handover.call(holder.address, {"do": "stop"}) or {}
                known = {message["run"] for message in messages}
                messages += [message for message in answer.get("runs", ()) if message["run"] not in known]
            else:
                messages = [one for one in messages if handover.call(holder.address, one) is None]
                if not messages:
                    return False
            self.store.clock.sleep(0.1)
        watch_log.write("no watcher is running, and none could be started")
        return False

    def _is_elected(self) -> bool:
        """Renew the lease; False when another process was elected, while this one hung."""
        if self.store.clock.monotonic() - self._elected_at > LEASE_S / 3 and self._mailbox:
            version, address = handover.own_version(), str(self._mailbox.path)
            if self.store.elect(self.me, version, address, LEASE_S).owner != str(self.me):
                return False
            self._elected_at = self.store.clock.monotonic()
            watch_log.bound()
        return True

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self, longest_s: float) -> bool:
        """Do what is due, once; blocking for `longest_s` seconds at the most. False when there is nothing left to do here."""
        if self._environs or self._sweeping:
            self._live_at = self.store.clock.monotonic()
        if self._replaced or self._is_gone() or self.store.clock.monotonic() - self._live_at >= LINGER_S:
            return False
        self._runs.safe_turn(longest_s)
        try:
            if not self._is_elected():
                self._replaced = True
                return False
            self._take_orphans()
        except StoreError as error:  # a full disk, another process that locks it for long
            watch_log.write(error)
        return True

    def _is_gone(self) -> bool:
        """Return whether the history is no longer there: SQLite would go on with a file that was removed."""
        return identity(self.store.database.path) != self._history

    def _take_orphans(self) -> None:
        if self.store.clock.monotonic() - self._orphans_at < ORPHANS_S:
            return
        self._orphans_at = self.store.clock.monotonic()
        orphans = self.store.orphans()
        for run_id in (unknown := [run_id for run_id in orphans if run_id not in self._environs]):
            self._restore(run_id, self._shell)
        if unknown:
            self._runs.lease_new()
        self._care_for_workers(orphans)
        self._drive_sweeps()

    def _drive_sweeps(self) -> None:
        """Start the processes of sweeps that have died, with what is known of their environments."""
        records = self._sweeps.running()
        self._sweeping = any(record.is_driven(self.store.clock) for record in records)
        for sweep_id in (record.sweep_id for record in records if not record.is_driven(self.store.clock)):
            stored = self.store.environments([sweep_id]).get(sweep_id)
            if stored is None or any(name not in self._shell for name in stored.hidden):
                continue  # a credential is known to its own shell alone: the next `cloudtrain sweep` there starts it
            self._sweeping = True
            environ = environment.restore(stored.pointers, stored.hidden, self._shell)
            handover.drive(self.home, sweep_id, environ)

    def _restore(self, run_id: str, shell: Environ) -> None:
        """Watch a run with what is known of its environment; variables whose values are not stored come from a shell."""
        record = self.store.environments([run_id]).get(run_id)
        if record is None:  # of an older cloudtrain, whose readers gave what they had
            self._add(run_id, shell)
            return
        environ = environment.restore(record.pointers, record.hidden, shell)
        lacking = tuple(name for name in record.hidden if name not in environ)
        self.store.keep_environments({run_id: EnvironmentRecord(record.pointers, record.hidden, lacking)})
        self._add(run_id, environ)

    def _add(self, run_id: str, environ: Environ) -> None:
        # Runs of one shell share one copy.
        environ = next((known for known in self._environs.values() if known == environ), environ)
        self._environs[run_id] = environ
        self._place(run_id, environ)

    def _ended(self, run_id: str) -> None:
        self._environs.pop(run_id, None)
        for record in self.store.dependents(run_id):
            self._carry_out({"do": "look", "run": record.run_id})

    # -- processes for other credentials ------------------------------------------------------------------------------

    def _place(self, run_id: str, environ: Environ) -> None:
        """Let a run be watched by a process whose calls have the run's credentials."""
        try:
            patterns = environment.patterns_of(self.store.find(run_id).backend)
        except (CloudtrainError, ImportError):
            patterns = ()  # a backend that is not installed: the multiplexer says so
        worker = None
        if environment.select(self._own, patterns) != environment.select(environ, patterns):
            worker = next((one for one in self._workers if one.serves(environ, patterns)), None)
            if worker is None:
                worker = Worker(self.home, environ, self.store.clock)
                self._workers.append(worker)
        for other in self._workers:
            if other is not worker and run_id in other.runs:
                other.runs.discard(run_id)
                other.send({"do": "forget", "run": run_id})
        if worker is None:
            self._runs.add(run_id, environ)
        else:
            self._runs.forget(run_id)
            self.store.offer(run_id)
            worker.runs.add(run_id)
            worker.send({"do": "watch", "run": run_id, "environ": environ})

    def _care_for_workers(self, orphans: Sequence[str]) -> None:
        """Forget the runs of workers that have ended, place those of a worker that died or hangs, end those without runs."""
        if not self._workers:
            return
        leased = self.store.leased(run_id for worker in self._workers for run_id in worker.runs)
        for worker in list(self._workers):
            for run_id in worker.runs - leased:
                worker.runs.discard(run_id)
                self._ended(run_id)
            alive = worker.is_alive(orphans)
            if not alive or self.store.clock.monotonic() - worker.used_at > LINGER_S:
                self._workers.remove(worker)
                worker.close()
            for run_id in list(worker.runs if not alive else worker.runs.intersection(orphans)):
                self._place(run_id, self._environs[run_id])

    # -- messages -----------------------------------------------------------------------------------------------------

    def _receive(self, message: Message) -> Message:
        """Have a message carried out by the thread that decides, and return the answer; on a thread of the mailbox."""
        answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._runs.post(lambda: answers.put(self._carry_out(message)))
        return answers.get(timeout=handover.WAIT_S)

    def _carry_out(self, message: Message) -> Message:
        try:
            if message["do"] == "watch":
                self._watch(message)
            elif message["do"] == "look":
                self._runs.look_now(message["run"])
                for worker in self._workers:
                    if message["run"] in worker.runs:
                        worker.send(message)
            elif message["do"] == "fill":
                self._fill(message["run"], message["environ"])
            elif message["do"] == "stop":
                self._replaced = True
                return {"runs": self._known_runs()}
        except Exception:
            traceback.print_exc()
            return {"ok": False}
        return {"ok": True}

    def _watch(self, message: Message) -> None:
        run_id, environ = message["run"], message["environ"]
        if message["own"]:
            known = self.store.environments([run_id]).get(run_id)
            hidden = environment.hidden(environ, [*message["sources"], *(known.hidden if known else ())])
            pointers = environment.pointers(environ)
            self.store.keep_environments({run_id: EnvironmentRecord(pointers, hidden, ())})
            self._add(run_id, environ)
        elif run_id not in self._environs:
            self._restore(run_id, environ)
        self._runs.lease_new()

    def _fill(self, run_id: str, found: Environ) -> None:
        """Add variables to a run's environment that were unknown since the watcher that had them died."""
        record = self.store.environments([run_id]).get(run_id)
        if record and run_id in self._environs:
            found = {name: value for name, value in found.items() if name in record.lacking}
            lacking = tuple(name for name in record.lacking if name not in found)
            self.store.keep_environments({run_id: EnvironmentRecord(record.pointers, record.hidden, lacking)})
            self._add(run_id, self._environs[run_id] | found)


def watch_run(store: Store, run_id: str, stand_by: Callable[[], None] = lambda: None) -> Status | None:
    """Watch one run in this thread until it is final, and return its status; blocking.

    `stand_by` is called once where another process watches it: it is taken over when that process ends. Returns None
    when the history is no longer there.
    """
    runs, told = Multiplexer(store.home, Process.here(), clock=store.clock, here=True), False
    try:
        while store.database.path.exists():
            entry, status = runs.runs.get(run_id), store.find(run_id).status
            if status.state.final and not (entry and entry.leased):
                return status
            if entry is None:
                runs.add(run_id, None)
                runs.lease_new()
            elif not (entry.leased or told):
                told = True
                stand_by()
            runs.turn(NOTICE_S)
        return None
    finally:
        runs.forget(run_id)


def serve(home: Path) -> int:
    """Do for the watcher, with the environment that is the first line of standard input, what the other lines say.

    It watches runs until the input is closed, or sends one attempt. Blocking; returns the exit code.
    """
    messages = (json.loads(line) for line in sys.stdin.buffer if line.endswith(b"\n"))
    os.environ.update(next(messages, {}))  # in memory only: /proc shows what a process began with
    first = next(messages, None)
    if first and first["do"] == "send":
        return _send(home, first)
    runs, closed = Multiplexer(home, Process.here()), threading.Event()

    def receive() -> None:
        for message in chain([first] if first else [], messages):
            runs.post(lambda message=message: obey(runs, message))  # type: ignore[misc]
        closed.set()
        runs.post(lambda: None)

    threading.Thread(target=receive, daemon=True).start()
    while not closed.is_set():
        runs.safe_turn(1.0)
    return 0


def obey(runs: Multiplexer, message: Message) -> None:
    """Do what the watcher says to a process that watches for it."""
    if message["do"] == "watch":
        runs.add(message["run"], message["environ"])
        runs.lease_new()
    elif message["do"] == "look":
        runs.look_now(message["run"])
    elif message["do"] == "forget":
        runs.forget(message["run"])


def _send(home: Path, message: Message) -> int:
    run_id, watcher, end = message["run"], Process.parse(message["watcher"]), message["end"]
    try:
        if watcher:
            seen = (end[0], Status(**{**end[1], "state": State(end[1]["state"])})) if end else None
            send_next(Store(home), run_id, watcher, seen)
    except CloudtrainError as error:
        watch_log.write(f"{run_id}: {error}")
        return error.exit_code
    return 0


def main() -> int:
    """Watch all runs of a home; see the module's docstring."""
    home = Path(sys.argv[1])
    if "--worker" in sys.argv:
        os._exit(serve(home))
    messages = json.loads(sys.stdin.read() or "[]")
    shell: Environ = messages[0]["environ"] if messages else dict(os.environ)
    # In memory only: /proc shows what a process began with.
    os.environ.update(environment.select(shell, (*environment.credentials(), *environment.BASE)))
    code = 0
    try:
        watcher = HomeWatcher(home, shell)
        # It starts as fast as the job. From now on it is nicer: where ranks share this machine's cores, it waits, not they.
        os.nice(5)
        watcher.run(messages)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # a thread that waits for a platform would keep the process


if __name__ == "__main__":
    main()

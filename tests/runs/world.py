"""The life of watchers in one thread and by a virtual clock: every process of a machine, three platforms, and what befalls them.

`World.live` goes through one drawn history. A process dies between any two of its writes and calls; others hang, and go
on when their leases have been given away. The laws are at the end of the file. A seed is replayed by

    python -m tests.runs.world SEED [-v]
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cloudtrain import events
from cloudtrain.backends.api import Plan
from cloudtrain.errors import CloudtrainError
from cloudtrain.events import LogLine, State, Status
from cloudtrain.history.database import Database
from cloudtrain.history.spool import Spool
from cloudtrain.history.store import Store
from cloudtrain.job import units
from cloudtrain.nodes.process import Process
from cloudtrain.policy import apply
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import handover, outcomes, retry, send
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching import groups, scheduler, watch, watch_all, workers
from cloudtrain.runs.watching.scheduler import Multiplexer
from cloudtrain.runs.watching.watch_all import HomeWatcher
from cloudtrain.source.bundle import Bundle
from cloudtrain.testing.clock import EPOCH
from tests.runs.fleet import FOREVER, Fleet, Killed, Life

HOSTILE, QUIET = 12, 1000  # turns of a history: in the first anything may happen, in the others nothing does any more
VERBOSE = "-v"  # prints what the watchers log
LINE_S = 7.0  # between two lines of a job
ACCOUNTS = ("one", "two")  # values of AWS_PROFILE, which every call of a platform reads
JOBS: dict[str, dict[str, Any]] = {
    "plain": {"target": "east", "retry": {"max_attempts": 3}},
    "several": {"target": ["east", "west", "lab"], "output": "gs://bucket/out", "resources": {"use_spot": True},
                "retry": {"max_attempts": 2}, "limits": {"max_wait": "2m"}},
    "capped": {"target": "west", "retry": {"max_attempts": 6},
               "limits": {"max_total_runtime": "10m", "max_runtime": "5m", "grace": "5s"}},
}  # fmt: skip


OPEN = Database.open
TEXT = events.format("metric", {"step": 0, "loss": 0.5}).replace("0,", "%d,")


@dataclass
class Lab:
    """What histories share, since it takes long to make: a home, and a plan of each job."""

    home: Path
    plans: dict[str, tuple[Plan, Bundle]] = field(default_factory=dict)
    database: Database | None = None

    connection: sqlite3.Connection | None = None

    def open(self, database: Database, *, writing: bool = False) -> sqlite3.Connection:
        """Open the history once, and in memory: to open it takes as long as ten looks at a run."""
        if self.connection is None:
            self.database = Database(self.home)
            OPEN(self.database)
            self.connection = sqlite3.connect(":memory:", isolation_level=None)
            self.connection.row_factory = sqlite3.Row
            self.database._connection.backup(self.connection)
        database._opened = self.database._opened
        return self.connection

    def begin(self, database: Database) -> sqlite3.Connection:
        """What Database.write does where no other process writes and nothing is damaged."""
        connection = self.open(database)
        connection.execute("BEGIN IMMEDIATE")
        return connection


@contextmanager
def laboratory(folder: Path) -> Iterator[Lab]:
    (folder / "source").mkdir()
    (folder / "source" / "train.py").write_text("print(1)\n")
    lab = Lab(folder / "home")
    with pytest.MonkeyPatch.context() as patch:
        Fleet(patch)
        submitter = Submitter(home=lab.home, watch=False)
        for name, job in JOBS.items():
            common = {"name": name, "source": str(folder / "source"), "entrypoint": "train.py"}
            lab.plans[name] = submitter.plan_job({**common, "environment": {"requirements": "none"}, **job}, [], None)
    yield lab


class Mail:
    """A watcher's mailbox: whoever calls it has it carried out."""

    boxes: dict[str, tuple[Process, Callable[[Mapping[str, Any]], Any]]] = {}

    def __init__(self, folder: Path, name: str, handle: Callable[[Mapping[str, Any]], Any]) -> None:
        self.path = folder / f"{len(self.boxes)}-{name}"
        self.boxes[str(self.path)] = Process.here(), handle

    def close(self) -> None:
        self.boxes.pop(str(self.path), None)


class Attendant(workers.Worker):
    """The watcher's process for another account: `world.turn` lets it do what is due. It ends with the watcher."""

    world: World

    def __init__(self, *given: Any) -> None:
        self.parent, self.process, self.told = self.world.me, self.world.born(), list[Any]()
        self.runs_of_it: Multiplexer | None = None
        super().__init__(*given)
        self.world.attendants[self.process] = self
        self.world.helpers += 1

    def send(self, message: Mapping[str, Any]) -> None:
        self.told.append(message)

    def close(self) -> None:
        self.world.living.discard(str(self.process))

    def _write(self) -> None:
        pass

    def turn(self) -> None:
        """What `serve` does."""
        if self.runs_of_it is None:
            os.environ.update(self.told.pop(0))
            self.runs_of_it = Multiplexer(self.world.lab.home, self.process, clock=self.world.clock)
        runs = self.runs_of_it
        while self.told:
            watch_all.obey(runs, self.told.pop(0))
        for _ in range(6):
            runs.safe_turn(0.0)
            if runs._inbox.empty():
                break


class Pipe:
    """The process of an attendant, as its watcher sees it."""

    stdin = None

    def __init__(self, world: World) -> None:
        self._world, self._name = world, f"{world.seed}-{world.births}"

    def _living(self) -> set[str]:
        return {name for name in self._world.living if name.endswith(f"|{self._name}")}

    def poll(self) -> int | None:
        return None if self._living() else -9

    def kill(self) -> None:
        self._world.living -= self._living()

    def wait(self) -> None:
        pass


class World(Fleet):
    """One history: its processes, its platforms, and what is drawn of both."""

    def __init__(self, seed: int, lab: Lab, patch: pytest.MonkeyPatch) -> None:
        self.me, self.living = Process("here", "boot", 1, "1"), {"here|boot|1|1"}
        self.base = {name: os.environ[name] for name in ("HOME", "PATH")}
        self.environs: dict[str, dict[str, str]] = {}  # of processes
        self.accounts: dict[str, str] = {}  # of runs
        self.attendants: dict[Process, Attendant] = {}
        super().__init__(patch, random.Random(f"watchers {seed}"))
        random.seed(seed)
        self.seed, self.lab = seed, lab
        self.watchers: dict[Process, HomeWatcher] = {}
        self.asleep: set[Process] = set()  # hang, though they live
        self.quiet = False
        self.ids: list[str] = []
        self.cancelled: set[str] = set()
        self.deaths = self.births = self.helpers = 0
        self.broken: list[str] = []
        self.wrong_by = 0.0  # the clock of the machine
        for kind in self.kinds.values():
            patch.setattr(kind, "poll_s", 20.0)
            patch.setattr(kind, "follow_s", 5.0)
            patch.setattr(kind, "variables", ("AWS_*",))
            if self.draw.random() < 0.5:
                patch.setattr(kind, "group", kind.name)
        patch.setattr(Process, "here", classmethod(lambda cls: self.me))
        patch.setattr(Process, "alive", property(lambda process: str(process) in self.living))
        patch.setattr(Database, "open", lambda database, **named: lab.open(database, **named))
        patch.setattr(os, "environ", self.base)
        patch.setattr(Attendant, "world", self, raising=False)
        patch.setattr(watch_all, "Worker", Attendant)
        patch.setattr(workers.subprocess, "Popen", lambda *_, **__: Pipe(self))
        patch.setattr(Database, "write", self._mortal(lab.begin, after=False))
        patch.setattr(Spool, "append", self._mortal(Spool.append))
        patch.setattr(apply, "installed", lambda _: [])  # policies of installed packages
        patch.setattr(watch_all, "LAST_S", 0.0)
        patch.setattr(scheduler, "ThreadPoolExecutor", groups.InPlace)
        patch.setattr(groups, "SHARE", FOREVER)
        patch.setattr(retry, "OUTAGE_S", 1.0)
        patch.setattr(retry, "CAPACITY_S", 10.0)
        patch.setattr(scheduler, "run_sender", self._send)
        patch.setattr(watch_all, "Mailbox", Mail)
        patch.setattr(HomeWatcher, "_receive", HomeWatcher._carry_out)
        patch.setattr(handover, "call", self._call)
        patch.setattr(handover, "detach", self._detach)
        patch.setattr(handover, "own_version", lambda: "1")
        patch.setattr(sys, "stderr", sys.stderr if VERBOSE in sys.argv else io.StringIO())
        Mail.boxes.clear()

    # -- processes ------------------------------------------------------------------------------------------------------

    def reach_point(self) -> None:
        if str(self.me) not in self.living:
            raise Killed
        super().reach_point()

    def act(self, process: Process, what: Callable[[], Any], *, mortal: bool = True) -> Any:
        """Let a process do something; it may die on the way, and then None is returned."""
        before = self.me, self.kill_after, os.environ
        dies = mortal and not self.quiet and self.chance(0.35)
        self.me, self.kill_after = process, self.draw.randint(1, 6) if dies else FOREVER
        os.environ = self.environs.get(str(process), self.base)  # type: ignore[assignment]  # noqa: B003 - of this process
        try:
            return what()
        except Killed:
            self.living.discard(str(process))
            self.deaths += 1
            return None
        finally:
            self.me, self.kill_after, os.environ = before

    def born(self, environ: Mapping[str, str] | None = None) -> Process:
        self.births += 1
        process = Process(os.uname().nodename, "boot", 100 + self.births, f"{self.seed}-{self.births}")
        self.living.add(str(process))
        self.environs[str(process)] = dict(environ or self.base)
        return process

    def shell(self, run_id: str) -> dict[str, str]:
        """Return the environment that a run was submitted with."""
        return {**self.base, "AWS_PROFILE": self.accounts[run_id]}

    def _detach(self, command: Sequence[str], *, given: bytes, **_: object) -> None:
        """Start a watcher, which is elected or hands its runs over before anything else happens."""
        messages = json.loads(given)
        process = self.born(messages[0]["environ"])

        def begin() -> None:
            watcher = HomeWatcher(self.lab.home, messages[0]["environ"], self.clock)
            if watcher.win(messages):
                self.watchers[process] = watcher
            else:
                self.living.discard(str(process))

        self.act(process, begin)

    def _call(self, address: str, message: Mapping[str, Any], *_: float) -> Any:
        process, handle = Mail.boxes.get(address, (None, None))
        if process is None or handle is None or str(process) not in self.living or process in self.asleep:
            return None
        return self.act(process, lambda: handle(message))

    def _send(self, home: Path, run_id: str, me: Process, environ: Mapping[str, str], end: Any = None) -> int:
        """Send an attempt as the watcher's child does."""

        def child() -> int:
            try:
                watch.send_next(Store(home, self.clock), run_id, me, end)
            except CloudtrainError as error:
                return error.exit_code
            return 0

        code = self.act(self.born(environ), child)
        self.reach_point()
        return 1 if code is None else code

    # -- platforms ------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return EPOCH + self.clock.monotonic()  # a platform's clock does not jump

    def chance(self, share: float) -> bool:
        return not self.quiet and super().chance(share)

    def plan_of(self, name: str) -> Plan:
        return next(kind.attempts[name].plan for kind in self.kinds.values() if name in kind.attempts)

    def live(self) -> list[str]:
        """Return what lives; not what is lost of a job with one target, whose platform may never confirm a cancel."""
        lost = {name for name, life in self.lives.items() if self.now >= life.lost_at}
        return [name for name in super().live() if name not in lost or self.plan_of(name).candidates]

    def check_account(self, name: str) -> None:
        """Note a call for an attempt that is made with the credentials of another shell."""
        account, wanted = os.environ.get("AWS_PROFILE"), self.accounts[name.rpartition("-a")[0]]
        if account != wanted:
            self.broken.append(f"a call for {name} of {wanted} was made as {account}")

    def status(self, name: str) -> Status:
        self.check_account(name)
        return super().status(name)

    def cancel(self, name: str) -> None:
        self.check_account(name)
        super().cancel(name)

    def admit(self, name: str) -> None:
        self.check_account(name)
        try:
            super().admit(name)
        except AssertionError as error:
            self.broken.append(str(error))  # a watcher only logs an exception
            raise

    def begin(self, name: str) -> Life:
        draw = self.draw
        limit = self.plan_of(name).manifest["max_runtime_s"] or FOREVER
        state, event = draw.choices(
            [
                (State.SUCCEEDED, ""),
                (State.FAILED, ""),
                (State.PREEMPTED, ""),
                (State.LOST, ""),
                (State.FAILED, "capacity"),
            ],
            [3, 1, 3, 2, 1],
        )[0]
        starts = self.now + draw.choice([0.0, 0.0, 15.0, 300.0])
        ends = starts + draw.choice([1.0, 20.0, 60.0, 200.0, 400.0])
        if event:
            starts, ends = FOREVER, self.now + draw.choice([5.0, 90.0])
        elif ends > starts + limit:
            ends, state = starts + limit, State.TIMED_OUT
        life = Life(starts, ends, state, event, draw.choice([0.0, 3.0, 40.0]), saves=draw.random() < 0.5)
        if state is State.LOST:
            life.lost_at, life.ends_at, life.stops_s = ends, FOREVER, 0.0
        return life

    def lines(self, name: str) -> list[LogLine]:
        """Return what an attempt has printed until now: a checkpoint where it saves one, then a metric in each line."""
        life = self.lives[name]
        end = min(self.now, life.ends_at, life.lost_at)
        count = int((end - life.starts_at) / LINE_S) + 1 if end >= life.starts_at else 0
        texts = [TEXT % step for step in range(count)]
        if life.saves and texts:
            texts[0] = events.format("checkpoint", {"written": "step-0.pt", "step": 0})
        at = units.format_time(life.starts_at) if texts else ""
        return [LogLine(at, 0, 0, seq, text, str(seq + 1)) for seq, text in enumerate(texts)]

    # -- what happens ---------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Go through the history, and check the laws."""
        for number in range(self.draw.choice([1, 1, 2])):
            self.submit(f"r{self.seed}-{number}")
        for _ in range(self.draw.randint(3, HOSTILE)):
            self.befall()
            self.clock.sleep(self.draw.choice([0.1, 1.0, 5.0, 11.0, 35.0, 120.0]))
            self.turn()
        self.quiet = True
        self.refuses, self.unreachable = set(), set()
        self.asleep.clear()  # they go on, whoever has their runs by now
        for _ in range(QUIET):
            if all(self.is_over(run_id) for run_id in self.ids):
                break
            self.clock.sleep(self.draw.choice([5.0, 20.0, 31.0]))
            self.turn()
        check(self)

    def is_over(self, run_id: str) -> bool:
        store = self.store()
        return store.find(run_id).status.state.final and not store.is_unread(run_id)

    def store(self) -> Store:
        if self._store is None:
            self._store = Store(self.lab.home, self.clock)
        return self._store

    _store: Store | None = None

    def submit(self, run_id: str) -> None:
        """Submit as a person would, who tries again after a crash."""
        plan, bundle = self.lab.plans[self.draw.choice(list(JOBS))]
        plan = Plan.from_json(plan.to_json(None).replace(plan.run_id, run_id))
        self.ids.append(run_id)
        self.accounts[run_id] = self.draw.choice(ACCOUNTS)
        while True:
            process, store = self.born(self.shell(run_id)), Store(self.lab.home, self.clock)

            def client(process: Process = process, store: Store = store) -> bool:
                backend = self.kinds[plan.backend]({}, self.lab.home / "runs", self.clock)
                newest = store.attempts(run_id)[-1:] if store.get(run_id) else []
                open_ = newest and newest[0].handle is None and not newest[0].status.state.final
                if open_ and outcomes.is_free(newest[0], self.clock):
                    send.send_again(store, newest[0], backend)
                elif not newest:
                    intent = lambda: store.intend(plan, identity=plan.identity, owner=process)  # noqa: E731
                    send.send_attempt(store, plan, backend, bundle, intent)
                if not store.find(run_id).status.state.final:
                    handover.start(store, store.attempts(run_id)[-1].plan)
                return True

            if self.act(process, client):
                return

    def befall(self) -> None:
        """Let one thing happen that nobody here has decided."""
        draw = self.draw
        what = draw.choices(
            ["nothing", "outage", "refusal", "clock", "hang", "wake", "kill", "cancel", "reader"],
            [6, 2, 2, 2, 2, 2, 2, 1, 3],
        )[0]
        if what == "outage":
            self.unreachable = set(draw.sample(sorted(self.kinds), draw.randint(0, 2)))
        elif what == "refusal":
            self.refuses = set(draw.sample(sorted(self.kinds), draw.randint(0, 3)))
        elif what == "clock":
            wrong_by = draw.choice([0.0, -600.0, -40.0, 40.0, 900.0])
            self.clock.jump(wrong_by - self.wrong_by)
            self.wrong_by = wrong_by
        elif what == "hang" and self.watchers:
            self.asleep.add(draw.choice([*self.watchers, *self.attendants]))
        elif what == "wake":
            self.asleep.clear()
        elif what == "kill" and self.watchers:
            self.living.discard(str(draw.choice([*self.watchers, *self.attendants])))
        elif what == "cancel":
            self.ask_cancel(draw.choice(self.ids))
        elif what == "reader":
            self.read(draw.choice(self.ids))

    def ask_cancel(self, run_id: str) -> None:
        """What `cloudtrain cancel` does, which may die after it has stored the request."""

        def client() -> None:
            Run(run_id, Store(self.lab.home, self.clock)).cancel()

        try:
            self.act(self.born(self.shell(run_id)), client)
        except CloudtrainError:
            pass
        if self.store().find(run_id).cancel_requested:
            self.cancelled.add(run_id)

    def read(self, run_id: str) -> None:
        """What `cloudtrain show` does: it looks itself where nobody watches, and starts a watcher."""
        self.act(
            self.born(self.shell(run_id)), lambda: Run(run_id, Store(self.lab.home, self.clock)).refresh(lambda _: None)
        )

    def turn(self) -> None:
        """Let each process that is awake do what is due; where none is left, somebody reads."""
        for process, watcher in list(self.watchers.items()):
            if str(process) not in self.living:
                del self.watchers[process]
            elif process not in self.asleep:
                for _ in range(6):
                    if not self.act(process, lambda watcher=watcher: watcher.step(0.0)):
                        self._leave(process, watcher)
                        break
                    if watcher._runs._inbox.empty():
                        break
        for process, attendant in list(self.attendants.items()):
            if str(process) not in self.living or str(attendant.parent) not in self.living:
                self.living.discard(str(process))
                del self.attendants[process]
            elif process not in self.asleep:
                self.act(process, attendant.turn)
        if not self.watchers or (self.quiet and self.chance(0.1)):
            for run_id in self.ids:
                self.read(run_id)

    def _leave(self, process: Process, watcher: HomeWatcher) -> None:
        """What HomeWatcher.run does at the end."""
        if str(process) in self.living:
            messages = self.act(process, watcher.leave)
            if messages and self.act(process, lambda: watcher.win(messages)):
                return
        del self.watchers[process]
        self.living.discard(str(process))


# -- the laws -----------------------------------------------------------------------------------------------------------


def check(world: World) -> None:
    """Assert what holds of every history. That no two attempts of a run live at once is asserted where one is sent."""
    store = world.store()
    assert not world.broken, world.broken
    for run_id in world.ids:
        run, attempts = store.find(run_id), store.attempts(run_id)
        newest = attempts[-1]
        assert run.status.state.final, f"{run_id} has not ended: {run.status}"
        living = world.live_beside(run_id)
        assert living == [], f"{run_id} is {run.status.state}, and {living} live on"
        sent = [name for _, name in world.sent if name.rpartition("-a")[0] == run_id]
        assert len(sent) == len(set(sent)), f"sent twice: {sent}"
        assert {a.attempt_id for a in attempts if a.handle} == set(sent), f"{sent} are not those of the history"
        begun = [attempt for attempt in attempts if attempt.status.event != "capacity"]
        limits = newest.plan.job["limits"]
        assert len(begun) <= newest.plan.job["retry"]["max_attempts"], f"{len(begun)} attempts"
        if limits.get("max_total_runtime"):
            lives = [world.lives[name] for name in sent]
            billed = sum(max(0.0, min(life.ends_at, life.lost_at, world.now) - life.starts_at) for life in lives)
            assert billed <= 605, f"{billed} s of 10 minutes are billed"
        if newest.attempt_id in world.lives and run.status.event != "capacity":
            state = world.lives[newest.attempt_id].state
            allowed = {state} | ({State.CANCELLED} if run_id in world.cancelled else set())
            allowed |= {State.TIMED_OUT} if "limits.max_total_runtime is" in run.status.reason else set()
            assert run.status.state in allowed or state is State.CANCELLED, f"{run.status} of {state}"
        for attempt in attempts:
            if attempt.attempt_id in world.lives:
                check_log(world, store, attempt.attempt_id)


def check_log(world: World, store: Store, name: str) -> None:
    """Each line of an attempt is in the history once."""
    lines = world.lines(name)
    steps = [line for line in lines if '"metric"' in line.text]
    with store.database.read() as db:
        rows = db.execute("SELECT count(*) FROM metrics WHERE attempt_id = ?", (name,)).fetchone()[0]
        points = db.execute("SELECT coalesce(sum(points), 0) FROM curves WHERE attempt_id = ?", (name,)).fetchone()[0]
    assert rows == points == len(steps), f"{name} printed {len(steps)} metrics: {rows} rows, {points} points"
    run_id, _, number = name.rpartition("-a")
    spool = Spool(store.home, run_id, int(number), world.clock)
    if spool.exists():
        assert [line.seq for line in spool.lines()] == [line.seq for line in lines], f"the copy of the log of {name}"


def live(seed: int, lab: Lab) -> World:
    """Go through one history; raises AssertionError with its seed."""
    with pytest.MonkeyPatch.context() as patch:
        world = World(seed, lab, patch)
        try:
            world.go()
        except BaseException as error:
            raise AssertionError(f"python -m tests.runs.world {seed}: {type(error).__name__} {error}") from error
        return world


def main() -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        with laboratory(folder) as lab:
            for seed in map(int, [word for word in sys.argv[1:] if word.isdigit()]):
                live(seed, lab)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

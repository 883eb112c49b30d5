"""Leases in the history: which process watches a run, and which one watches all runs of a home on a host."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cloudtrain.backends.plan import ATTACHED, Plan
from cloudtrain.clock import Clock
from cloudtrain.events import FINAL
from cloudtrain.history.database import placeholders
from cloudtrain.history.file import repaired
from cloudtrain.history.queries import History
from cloudtrain.nodes.process import Process

_FINAL = tuple(sorted(state.value for state in FINAL))


@dataclass(frozen=True)
class WatcherRecord:
    """The process that watches all runs of a home on one host."""

    owner: str
    version: str  # of its cloudtrain
    address: str  # path of its socket
    expires_at: float  # seconds since 1970

    def is_valid(self, clock: Clock) -> bool:
        """Whether the process lives and has renewed its lease."""
        return _is_valid(self.owner, self.expires_at, clock.now())


@dataclass(frozen=True)
class EnvironmentRecord:
    """What the history has of the environment that a run was submitted with; never a credential's value."""

    pointers: Mapping[str, str]  # paths and names
    hidden: tuple[str, ...]  # variables whose values only the watcher's memory has
    lacking: tuple[str, ...]  # those of them that the watcher does not have


@repaired
class Leases(History):
    """The part of the store that says who watches. Every public method is one transaction."""

    # -- of one run ---------------------------------------------------------------------------------------------------

    def lease(self, run_id: str, owner: Process, ttl_s: float) -> bool:
        """Take or renew the lease to watch a run; False while another living process holds it."""
        return run_id in self.lease_all([run_id], owner, ttl_s)

    def release(self, run_id: str, owner: Process) -> None:
        """Release the lease to watch a run, if this process holds it."""
        with self.database.write() as db:
            db.execute("DELETE FROM leases WHERE run_id = ? AND owner = ?", (run_id, str(owner)))

    def watched(self, run_id: str) -> bool:
        """Return whether a living process watches the run."""
        with self.database.read() as db:
            row = db.execute("SELECT owner, expires_at FROM leases WHERE run_id = ?", (run_id,)).fetchone()
        return bool(row) and _is_valid(row[0], row[1], self.clock.now())

    def abandon(self, owner: Process, run_id: str | None = None) -> None:
        """Let the next watcher take a run, or all runs, of a watcher that still lives."""
        with self.database.write() as db:
            db.execute(
                "UPDATE leases SET expires_at = 0 WHERE owner = ? AND (? IS NULL OR run_id = ?)",
                (str(owner), run_id, run_id),
            )

    # -- of many runs -------------------------------------------------------------------------------------------------

    def offer(self, run_id: str) -> None:
        """Give up a run, so that it has no watcher: the next watcher of this host takes it."""
        with self.database.write() as db:
            row = db.execute("SELECT owner, expires_at FROM leases WHERE run_id = ?", (run_id,)).fetchone()
            if not row or not _is_valid(row[0], row[1], self.clock.now()):
                db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, 0)", (run_id, _offered()))

    def lease_all(self, run_ids: Iterable[str], owner: Process, ttl_s: float) -> set[str]:
        """Take or renew the leases of runs and return those that were taken; other living processes hold the rest."""
        moment, taken = self.clock.now(), set()
        with self.database.write() as db:
            for run_id in run_ids:
                row = db.execute("SELECT owner, expires_at FROM leases WHERE run_id = ?", (run_id,)).fetchone()
                if row and row[0] != str(owner) and _is_valid(row[0], row[1], moment):
                    continue
                db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (run_id, str(owner), moment + ttl_s))
                taken.add(run_id)
        return taken

    def renew(self, owner: Process, ttl_s: float) -> set[str]:
        """Renew all leases of a process and return the ids of its runs."""
        with self.database.write() as db:
            db.execute("UPDATE leases SET expires_at = ? WHERE owner = ?", (self.clock.now() + ttl_s, str(owner)))
            return {row[0] for row in db.execute("SELECT run_id FROM leases WHERE owner = ?", (str(owner),))}

    def begin_held(self, plan: Plan, owner: Process | str) -> bool:
        """Give a held attempt its final plan and the process that sends it; False when another process was first."""
        job = json.dumps(plan.job)
        with self.database.write() as db:
            row = (plan.to_json(None), str(owner), plan.attempt_id)
            query = "UPDATE attempts SET plan = ?, owner = ? WHERE attempt_id = ? AND owner = '' AND handle IS NULL"
            released = bool(db.execute(query, row).rowcount)
            if released:
                db.execute("UPDATE runs SET job = ?, reason = '' WHERE run_id = ?", (job, plan.run_id))
        if released:
            self.database.record_attempt(plan)
        return released

    def orphans(self) -> list[str]:
        """Return the runs that have not ended, or whose log is unread, and whose watcher on this host has died or hangs."""
        moment = self.clock.now()
        query = (
            "SELECT run_id, owner, expires_at FROM leases JOIN runs USING (run_id)"
            f" WHERE (state NOT IN ({placeholders(_FINAL)}) OR run_id IN unread_runs) AND substr(identity, 1, ?) != ?"
        )
        with self.database.read() as db:
            rows = db.execute(query, (*_FINAL, len(ATTACHED), ATTACHED)).fetchall()
        return [row[0] for row in rows if _is_here(row[1]) and not _is_valid(row[1], row[2], moment)]

    def leased(self, run_ids: Iterable[str]) -> set[str]:
        """Return those of some runs that have a watcher, dead or alive, or are offered to one: their ends are not reached."""
        query = "SELECT run_id FROM leases WHERE run_id IN (SELECT value FROM json_each(?))"
        with self.database.read() as db:
            return {row[0] for row in db.execute(query, (json.dumps(list(run_ids)),))}

    def cancelled(self, owner: Process) -> list[str]:
        """Return the runs of a watcher that are to be cancelled."""
        query = "SELECT run_id FROM leases JOIN runs USING (run_id) WHERE owner = ? AND cancel_at IS NOT NULL"
        with self.database.read() as db:
            return [row[0] for row in db.execute(query, (str(owner),))]

    # -- of a home ----------------------------------------------------------------------------------------------------

    def watcher(self) -> WatcherRecord | None:
        """Return the process that watches all runs on this host, dead or alive; None where there was none."""
        with self.database.read() as db:
            return _watcher(db)

    def elect(self, owner: Process, version: str, address: str, ttl_s: float) -> WatcherRecord:
        """Take or renew the lease to watch all runs on this host, and return who holds it.

        The runs of a process that hangs become orphans.
        """
        with self.database.write() as db:
            holder = _watcher(db)
            if holder and holder.owner != str(owner):
                if holder.is_valid(self.clock):
                    return holder
                db.execute("UPDATE leases SET expires_at = 0 WHERE owner = ?", (holder.owner,))
            record = WatcherRecord(str(owner), version, address, self.clock.now() + ttl_s)
            db.execute(
                "INSERT OR REPLACE INTO watchers VALUES (?, ?, ?, ?, ?)",
                (os.uname().nodename, record.owner, version, address, record.expires_at),
            )
            return record

    def resign(self, owner: Process) -> None:
        """Give up the lease to watch all runs, if this process holds it."""
        with self.database.write() as db:
            db.execute("DELETE FROM watchers WHERE owner = ?", (str(owner),))

    # -- environments -------------------------------------------------------------------------------------------------

    def keep_environments(self, records: Mapping[str, EnvironmentRecord]) -> None:
        """Store what may be stored of the environments of runs."""
        if not records:
            return
        with self.database.write() as db:
            db.executemany(
                "INSERT OR REPLACE INTO environments VALUES (?, ?, ?, ?)",
                [
                    (run_id, json.dumps(dict(one.pointers)), json.dumps(one.hidden), json.dumps(one.lacking))
                    for run_id, one in records.items()
                ],
            )

    def environments(self, run_ids: Iterable[str]) -> dict[str, EnvironmentRecord]:
        """Return what is stored of the environments of runs; runs of an older cloudtrain have none."""
        found = {}
        with self.database.read() as db:
            for run_id in run_ids:
                query = "SELECT pointers, hidden, lacking FROM environments WHERE run_id = ?"
                if row := db.execute(query, (run_id,)).fetchone():
                    pointers, hidden, lacking = map(json.loads, row)
                    found[run_id] = EnvironmentRecord(pointers, tuple(hidden), tuple(lacking))
        return found


def _watcher(db: sqlite3.Connection) -> WatcherRecord | None:
    query = "SELECT owner, version, address, expires_at FROM watchers WHERE host = ?"
    row = db.execute(query, (os.uname().nodename,)).fetchone()
    return WatcherRecord(*row) if row else None


def _offered() -> str:
    """Return the owner of a run that a watcher of this host is to take."""
    return f"offered|{os.uname().nodename}"


def _is_here(owner: str) -> bool:
    process = Process.parse(owner)
    return owner == _offered() or (process is not None and process.alive is not None)


def _is_valid(owner: str, expires_at: float, moment: float) -> bool:
    process = Process.parse(owner)
    return expires_at > moment and not (process and process.alive is False)

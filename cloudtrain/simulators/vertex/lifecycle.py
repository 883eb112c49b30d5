"""The life of one custom job: queued, started, restarted after a Spot loss or an exit code that may be transient, ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.simulators.http import Refusal
from cloudtrain.simulators.replicas import Replica, environments
from cloudtrain.simulators.vertex.logs import Entries, stamp

TRANSIENT = (6, 134, 11, 139)  # exit codes after which the platform tries again
MAX_RESTARTS, MAX_SPOT_RESTARTS = 3, 6
TICK_S = 0.02


@dataclass
class Pace:
    """How long things take, and whether jobs are executed at all."""

    execute: bool = True
    queue_s: float = 0.0
    worker_late_s: float = 0.0  # replicas but the first start so much later
    grace_s: float = 30.0  # between SIGTERM and SIGKILL
    restart_s: float = 0.0
    service_lines: bool = False  # the platform's own lines in the log


class Life:
    """Executes a job in a thread of its own, and tells every change of its fields to `change`."""

    def __init__(
        self,
        job: Mapping[str, Any],
        folder: Path,
        entries: Entries,
        pace: Pace,
        storage_url: str,
        change: Callable[..., None],
    ) -> None:
        self._job, self._folder, self._entries, self._pace, self._change = job, folder, entries, pace, change
        self._storage_url = storage_url
        self._number = folder.name
        self._cancelled = threading.Event()
        self._replicas: list[Replica] = []
        self._lost: dict[str, float] = {}  # task -> when it is killed
        self._thread = threading.Thread(target=self._run, name=f"job-{self._number}", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled.set()

    def preempt(self, task: str, notice: bool) -> None:
        """Take replicas' machines away, all of them where no task is named."""
        for replica in list(self._replicas):
            if replica.task == (task or replica.task) and replica.code is None:
                self._lost[replica.task] = time.monotonic() + (self._pace.grace_s if notice else 0)
                if notice:
                    replica.ask()

    def join(self) -> None:
        self._thread.join(120)

    def _run(self) -> None:
        try:
            state, error = self._live()
        except Refusal as refusal:
            state, error = "JOB_STATE_FAILED", {"code": 3, "message": refusal.message}
        except Exception as broken:
            message = f"Internal error occurred: {type(broken).__name__}: {broken}"
            state, error = "JOB_STATE_FAILED", {"code": 13, "message": message}
        finally:
            self._end_all()
        self._say(f"Job ended in state {state}.")
        fields = {"error": error} if error else {}
        self._change(state=state, endTime=stamp(time.time()), **fields)

    def _live(self) -> tuple[str, dict[str, Any] | None]:
        scheduling = self._job["jobSpec"].get("scheduling") or {}
        if self._pace.queue_s:
            longest = _seconds(scheduling.get("maxWaitDuration"))
            if self._cancelled.wait(min(self._pace.queue_s, longest or self._pace.queue_s)):
                return "JOB_STATE_CANCELLED", None
            if longest and longest < self._pace.queue_s:
                message = "Resources are insufficient in region: the job has waited for as long as max_wait_duration."
                return "JOB_STATE_EXPIRED", {"code": 8, "message": message}
            self._change(state="JOB_STATE_PENDING")
        restarts = spot = 0
        deadline = time.monotonic() + (_seconds(scheduling.get("timeout")) or 7 * 86400)
        self._change(startTime=stamp(time.time()))
        while True:
            self._say("Job is running.")
            self._change(state="JOB_STATE_RUNNING")
            self._start()
            why, task, code = self._attend(deadline)
            lost = bool(self._lost)
            self._end_all()
            if why == "cancelled":
                return "JOB_STATE_CANCELLED", {"code": 1, "message": "CANCELED"}
            if why == "timeout":
                return "JOB_STATE_FAILED", {"code": 4, "message": "The job ran longer than its timeout."}
            if code == 0:
                return "JOB_STATE_SUCCEEDED", None
            may = not scheduling.get("disableRetries")
            if lost and may and spot < MAX_SPOT_RESTARTS:
                spot += 1
            elif not lost and code in TRANSIENT and may and restarts < MAX_RESTARTS:
                restarts += 1
            else:
                message = f"The replica {task} exited with a non-zero status of {code}."
                if lost:
                    message = f"The replica {task} was preempted. {message}"
                return "JOB_STATE_FAILED", {"code": 3, "message": message}
            self._say(f"The replica {task} exited with status {code}; the job is restarted.")
            self._change(state="JOB_STATE_PENDING")
            if self._cancelled.wait(self._pace.restart_s):
                return "JOB_STATE_CANCELLED", None

    def _start(self) -> None:
        self._lost = {}
        for number, (task, command, env) in enumerate(environments(self._job, self._storage_url)):
            if number == 1 and self._cancelled.wait(self._pace.worker_late_s):
                return
            folder = self._folder / f"{time.time_ns()}-{task}"
            heard = _hearing(self._entries, self._number, task)
            self._replicas.append(Replica(task, command, env, folder, heard))

    def _attend(self, deadline: float) -> tuple[str, str, int]:
        """Wait until the primary has ended well, or any replica badly; blocking. Return why, which one, and its code."""
        while True:
            now = time.monotonic()
            if self._cancelled.is_set():
                self._ask_all()
                return "cancelled", "", 0
            if now >= deadline:
                self._ask_all()
                return "timeout", "", 0
            for replica in list(self._replicas):
                if self._lost.get(replica.task, now + 1) <= now and replica.code is None:
                    replica.end()
            codes = [(replica.task, replica.code) for replica in self._replicas]
            bad = next(((task, code) for task, code in codes if code), None)
            if bad is not None:
                self._ask_all()
                return "failed", *bad
            if codes and codes[0][1] == 0:
                return "done", codes[0][0], 0  # the others are killed without a word
            time.sleep(TICK_S)

    def _ask_all(self) -> None:
        """Ask what still runs to leave, and wait while it may."""
        for replica in self._replicas:
            replica.ask()
        until = time.monotonic() + self._pace.grace_s
        while any(replica.code is None for replica in self._replicas) and time.monotonic() < until:
            time.sleep(TICK_S)

    def _end_all(self) -> None:
        for replica in self._replicas:
            replica.end()
        self._replicas = []

    def _say(self, text: str) -> None:
        if self._pace.service_lines:
            self._entries.write(self._number, "service", [text])


def _hearing(entries: Entries, number: str, task: str) -> Callable[[list[str]], None]:
    return lambda texts: entries.write(number, task, texts)


def _seconds(duration: str | None) -> float | None:
    return float(duration.rstrip("s")) if duration else None

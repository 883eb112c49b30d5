"""Executes one simulated custom job: queue, start, restart after a Spot preemption or a transient exit code, end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.job.units import format_time
from cloudtrain.simulators.http import ApiError
from cloudtrain.simulators.replicas import Replica, list_containers
from cloudtrain.simulators.steps import Steps, follow
from cloudtrain.simulators.vertex.logs import LogEntries

TRANSIENT = (6, 134, 11, 139)  # exit codes after which the platform restarts the job
MAX_RESTARTS, MAX_SPOT_RESTARTS = 3, 6


@dataclass
class Behavior:
    """How the simulated platform behaves: durations in seconds, and whether it executes jobs."""

    execute: bool = True
    queue_s: float = 0.0
    worker_late_s: float = 0.0  # delay of all replicas but the first
    grace_s: float = 30.0  # between SIGTERM and SIGKILL
    restart_s: float = 0.0
    service_lines: bool = False  # the platform writes its own lines to the log


class JobLifecycle:
    """Executes a job, in a thread after `start`, and reports changed fields to `change`."""

    def __init__(
        self,
        job: Mapping[str, Any],
        folder: Path,
        entries: LogEntries,
        behavior: Behavior,
        storage_url: str,
        change: Callable[..., None],
    ) -> None:
        self._job, self._folder, self._entries, self._behavior, self._change = job, folder, entries, behavior, change
        self._storage_url = storage_url
        self._number = folder.name
        self._cancelled = threading.Event()
        self._replicas: list[Replica] = []
        self._kill_at: dict[str, float] = {}  # task -> time of its SIGKILL

    def start(self) -> None:
        """Execute the job in a thread."""
        self._thread = threading.Thread(
            target=lambda: follow(self.steps(), self._entries.clock), name=f"job-{self._number}", daemon=True
        )
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled.set()

    def preempt(self, task: str, notice: bool) -> None:
        """Preempt the replica of a task, or all replicas where `task` is empty."""
        for replica in list(self._replicas):
            if replica.task == (task or replica.task) and replica.code is None:
                self._kill_at[replica.task] = self._entries.clock.monotonic() + (
                    self._behavior.grace_s if notice else 0
                )
                if notice:
                    replica.terminate()

    def join(self) -> None:
        self._thread.join(120)

    def steps(self) -> Steps:
        """Execute the job."""
        try:
            state, error = yield from self._execute()
        except ApiError as refusal:
            state, error = "JOB_STATE_FAILED", {"code": 3, "message": refusal.message}
        except Exception as failure:
            message = f"Internal error occurred: {type(failure).__name__}: {failure}"
            state, error = "JOB_STATE_FAILED", {"code": 13, "message": message}
        finally:
            self._kill_all()
        self._log(f"Job ended in state {state}.")
        fields = {"error": error} if error else {}
        self._change(state=state, endTime=format_time(self._entries.clock.now()), **fields)

    def _execute(self) -> Generator[float, None, tuple[str, dict[str, Any] | None]]:
        scheduling = self._job["jobSpec"].get("scheduling") or {}
        if self._behavior.queue_s:
            longest = _parse_duration(scheduling.get("maxWaitDuration"))
            if (yield from self._pause(min(self._behavior.queue_s, longest or self._behavior.queue_s))):
                return "JOB_STATE_CANCELLED", None
            if longest and longest < self._behavior.queue_s:
                message = "Resources are insufficient in region: the job has waited for as long as max_wait_duration."
                return "JOB_STATE_EXPIRED", {"code": 8, "message": message}
            self._change(state="JOB_STATE_PENDING")
        restarts = spot_restarts = 0
        deadline = self._entries.clock.monotonic() + (_parse_duration(scheduling.get("timeout")) or 7 * 86400)
        self._change(startTime=format_time(self._entries.clock.now()))
        while True:
            self._log("Job is running.")
            self._change(state="JOB_STATE_RUNNING")
            yield from self._start_replicas()
            outcome, task, code = yield from self._wait_for_end(deadline)
            preempted = bool(self._kill_at)
            self._kill_all()
            if outcome == "cancelled":
                return "JOB_STATE_CANCELLED", {"code": 1, "message": "CANCELED"}
            if outcome == "timeout":
                return "JOB_STATE_FAILED", {"code": 4, "message": "The job ran longer than its timeout."}
            if code == 0:
                return "JOB_STATE_SUCCEEDED", None
            may_restart = not scheduling.get("disableRetries")
            if preempted and may_restart and spot_restarts < MAX_SPOT_RESTARTS:
                spot_restarts += 1
            elif not preempted and code in TRANSIENT and may_restart and restarts < MAX_RESTARTS:
                restarts += 1
            else:
                message = f"The replica {task} exited with a non-zero status of {code}."
                if preempted:
                    message = f"The replica {task} was preempted. {message}"
                return "JOB_STATE_FAILED", {"code": 3, "message": message}
            self._log(f"The replica {task} exited with status {code}; the job is restarted.")
            self._change(state="JOB_STATE_PENDING")
            if (yield from self._pause(self._behavior.restart_s)):
                return "JOB_STATE_CANCELLED", None

    def _pause(self, seconds: float) -> Generator[float, None, bool]:
        """Wait; True when the job was cancelled meanwhile."""
        until = self._entries.clock.monotonic() + seconds
        while not self._cancelled.is_set() and self._entries.clock.monotonic() < until:
            yield until
        return self._cancelled.is_set()

    def _start_replicas(self) -> Steps:
        self._kill_at = {}
        for number, (task, command, env) in enumerate(list_containers(self._job, self._storage_url)):
            if number == 1 and (yield from self._pause(self._behavior.worker_late_s)):
                return
            folder = self._folder / f"{int(self._entries.clock.now() * 1e9)}-{task}"
            write_lines = _log_writer(self._entries, self._number, task)
            self._replicas.append(Replica(task, command, env, folder, write_lines))

    def _wait_for_end(self, deadline: float) -> Generator[float, None, tuple[str, str, int]]:
        """Wait until the primary succeeds or any replica fails; return outcome, task and exit code."""
        while True:
            now = self._entries.clock.monotonic()
            if self._cancelled.is_set():
                yield from self._terminate_all()
                return "cancelled", "", 0
            if now >= deadline:
                yield from self._terminate_all()
                return "timeout", "", 0
            for replica in list(self._replicas):
                if self._kill_at.get(replica.task, now + 1) <= now and replica.code is None:
                    replica.kill()
            codes = [(replica.task, replica.code) for replica in self._replicas]
            failed = next(((task, code) for task, code in codes if code), None)
            if failed is not None:
                yield from self._terminate_all()
                return "failed", *failed
            if codes and codes[0][1] == 0:
                return "done", codes[0][0], 0  # the others are killed without notice
            yield min([deadline, *self._kill_at.values()])

    def _terminate_all(self) -> Steps:
        """Send SIGTERM to running replicas and wait for the grace period."""
        for replica in self._replicas:
            replica.terminate()
        until = self._entries.clock.monotonic() + self._behavior.grace_s
        while any(replica.code is None for replica in self._replicas) and self._entries.clock.monotonic() < until:
            yield until

    def _kill_all(self) -> None:
        for replica in self._replicas:
            replica.kill()
        self._replicas = []

    def _log(self, text: str) -> None:
        if self._behavior.service_lines:
            self._entries.write(self._number, "service", [text])


def _log_writer(entries: LogEntries, number: str, task: str) -> Callable[[list[str]], None]:
    return lambda texts: entries.write(number, task, texts)


def _parse_duration(duration: str | None) -> float | None:
    return float(duration.rstrip("s")) if duration else None

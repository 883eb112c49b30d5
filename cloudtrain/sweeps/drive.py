"""The process that drives one sweep: it draws trials, submits each once, stops the worse ones, and ends when all is done.

    python -m cloudtrain.sweeps.drive HOME SWEEP        the environment of the sweep's shell as JSON on standard input

A lease in the history says which process drives. Whatever was killed, the next one continues from the history: a trial is
stored before it is submitted, under a key of its own, so that it becomes one run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from pathlib import Path

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, CloudtrainError, StoreError, Unreachable
from cloudtrain.events import State
from cloudtrain.history.leases import EnvironmentRecord
from cloudtrain.history.store import Store
from cloudtrain.history.trials import SweepHistory, SweepRecord, TrialRecord
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import environment
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import handover, watch_log
from cloudtrain.sweeps import causes, standing
from cloudtrain.sweeps.draw import draw
from cloudtrain.sweeps.early_stop import EarlyStop
from cloudtrain.sweeps.send import Trials
from cloudtrain.sweeps.standing import Spent

LEASE_S = 30.0
TOGETHER_S = 900.0  # the lease while many calls are sent; it ends with the process
SOON_S, PAUSE_S = 0.05, 1.0  # between two looks at the trials: the first pause after a change, and the longest
CALLS_S = 0.25  # the longest between two looks at calls of a function, which may be short
CARE_S = 5.0  # how often it is checked that the live runs are watched


class Driver:
    """Drives a sweep from one look to the next."""

    def __init__(self, home: Path, sweep_id: str, clock: Clock = SYSTEM) -> None:
        self.home, self.sweep_id = home, sweep_id
        self.me = Process.here()
        self.history, self.store = SweepHistory(home, clock), Store(home, clock)
        self.trials = Trials(home, self.history.find(sweep_id))
        self.sweep = self.trials.sweep
        self._cared_at = 0.0
        self._looked: list[str] = []  # cursors of the logs when reports were last compared
        self._drawn_out = False  # nothing is left to draw, or to pay for

    def run(self) -> None:
        """Drive until the sweep has ended, is paused, or another process drives it; blocking."""
        path = self.history.database.path  # SQLite would make a file anew that was removed
        starting = handover.starting(self.home, self.sweep_id)
        pause_s, longest_s = SOON_S, CALLS_S if self.sweep.of_calls else PAUSE_S
        try:
            while path.exists() and self.history.lease(self.sweep_id, self.me, LEASE_S):
                starting.unlink(missing_ok=True)
                try:
                    moved = self.look()
                except Unreachable as error:
                    watch_log.write(f"{self.sweep_id}: {error}")
                    moved = False
                pause_s = SOON_S if moved else min(pause_s * 1.2, longest_s)
                if not moved:
                    self.store.clock.sleep(pause_s)
        except Exception:
            with contextlib.suppress(OSError):
                starting.touch()  # the watcher starts the next process after a pause
            raise
        if path.exists():
            self.history.release(self.sweep_id, self.me)

    def look(self) -> bool:
        """Bring the sweep forward once; True where something has happened. Raises StoreError, Unreachable."""
        record, trials = self.history.find(self.sweep_id), self.history.trials(self.sweep_id)
        moved = False
        unsent = [trial for trial in trials if not trial.ended and trial.run_id is None]
        if self.sweep.of_calls and len(unsent) > 1:
            self.history.lease(self.sweep_id, self.me, TOGETHER_S)
            self.trials.expect(unsent)
        for trial in trials:
            if trial.ended:
                continue
            if trial.run_id is None:
                self._submit(trial)
                moved = True
            elif trial.deleted:
                self.history.end_trial(self.sweep_id, trial.number, None)
                moved = True
            elif trial.state is not None and trial.state.final and not self.store.is_unread(trial.run_id):
                self._end(trial, trials)
                moved = True
        if moved:
            return True
        live = [trial for trial in trials if not trial.ended]
        self._care(live)
        counted = self.sweep.budget.hours is not None or self.sweep.budget.usd is not None
        spent = standing.spent(self.store, trials) if counted else Spent()
        end = standing.outcome(self.sweep, record, trials, spent, exhausted=self._drawn_out)
        if record.state == "RUNNING" and (why := causes.find_common(self.sweep, trials, self.store)):
            end = "FAILED", why
        elif end and end[0] == "FAILED" and (broken := [trial for trial in trials if standing.failed(trial)]):
            end = "FAILED", f"{end[1]}; trial {broken[-1].number}: {causes.describe(broken[-1], self.store)}"
        if end:
            self._cancel(live, f"the sweep has ended: {end[1]}" if end[0] != "CANCELLED" else end[1])
            if not live:
                self.history.set_state(self.sweep_id, *end, old=("RUNNING", "STOPPING"))
            return not live
        moved = self._stop_early(live, trials)
        return self._draw(record, trials, live, spent) or moved

    # -- trials -------------------------------------------------------------------------------------------------------

    def _draw(self, record: SweepRecord, trials: list[TrialRecord], live: list[TrialRecord], spent: Spent) -> bool:
        """Store and submit the next trial where one more may run; True where it did."""
        budget = self.sweep.budget
        drawn = sum(trial.retry_of is None for trial in trials)
        if len(live) >= self.sweep.max_parallel or (
            budget.trials is not None and drawn >= budget.trials + record.extra
        ):
            return False
        if budget.hours is not None and spent.hours >= budget.hours:
            return False
        found = draw(self.sweep, drawn + 1, standing.past(self.sweep, trials, self.store))
        if found is None:
            self._drawn_out = True
            return False
        params, point = found
        load = dict.fromkeys(map(str, self.trials.targets), 0)
        for trial in live:
            load[trial.target] = load.get(trial.target, 0) + 1
        target = min(load, key=lambda name: load[name])
        number = len(trials) + 1
        if (most := self.trials.most_together(number, params, target)) > 1:
            return not live and self._draw_calls(drawn, most, target)
        if budget.usd is not None:
            more = self.trials.most_usd(number, params, target)
            if spent.usd + spent.promised_usd + more > budget.usd:
                self._drawn_out = not live  # else an end may leave more than was promised
                return False
        self._drawn_out = False
        self.history.add_trial(self.sweep_id, number, params, point, target)
        self._submit(self.history.trials(self.sweep_id)[number - 1])
        return True

    def _draw_calls(self, drawn: int, most: int, target: str) -> bool:
        """Store the next calls of a group, which the next look submits together; the platform keeps to max_parallel."""
        for number in range(drawn + 1, drawn + most + 1):
            if (found := draw(self.sweep, number, ())) is None:
                break
            self.history.add_trial(self.sweep_id, number, *found, target)
        return True

    def _submit(self, trial: TrialRecord) -> None:
        """Submit a trial that is stored, or find the run that an earlier process has submitted for it."""
        try:
            run_id = self.trials.submit(trial)
        except (Unreachable, StoreError):
            raise
        except CloudtrainError as error:
            watch_log.write(f"{self.sweep_id}: trial {trial.number}: {error}")
            run_id = self.trials.run_id(trial)
            if self.store.get(run_id) is None:  # it was refused before it was stored
                self.history.stop(self.sweep_id, trial.number, f"refused: {error.message}")
                self.history.end_trial(self.sweep_id, trial.number, None)
                self.trials.discard(trial)
                return
        self.history.submitted(self.sweep_id, trial.number, run_id)
        self.store.acknowledge(run_id)

    def _end(self, trial: TrialRecord, trials: list[TrialRecord]) -> None:
        """Store the result of a trial that has ended, and repeat one that has failed once."""
        result = standing.result_of(self.store, trial.run_id, self.sweep.metrics)
        broken = trial.state not in (State.SUCCEEDED, State.CANCELLED)
        if (
            broken
            and not self.sweep.of_calls
            and not trial.stopped
            and trial.retry_of is None
            and self.history.find(self.sweep_id).state == "RUNNING"
        ):
            repeated = any(other.retry_of == trial.number for other in trials)
            if not repeated and not causes.is_common(trial, self.store):
                number = len(self.history.trials(self.sweep_id)) + 1
                self.history.add_trial(
                    self.sweep_id, number, trial.params, trial.point, trial.target, retry_of=trial.number
                )
        self.history.end_trial(self.sweep_id, trial.number, None if broken else result)

    def _stop_early(self, live: list[TrialRecord], trials: list[TrialRecord]) -> bool:
        """Cancel the running trials that others have beaten, where any trial has reported since; True where it did."""
        rule = self.sweep.early_stop
        if rule is None:
            return False
        running = [trial for trial in live if trial.run_id and trial.state is State.RUNNING and not trial.stopped]
        cursors = [str(self.store.attempts(trial.run_id)[-1].cursor) for trial in running if trial.run_id]
        looked = [str(len(trials)), str(len(live)), *cursors]
        if looked == self._looked:
            return False
        self._looked = looked
        beaten = {trial.number: why for trial in running if (why := self._why_stopped(rule, trial, trials))}
        for trial in running:
            if trial.number in beaten:
                self._cancel([trial], f"{standing.PRUNED}: {beaten[trial.number]}")
        return bool(beaten)

    def _why_stopped(self, rule: EarlyStop, trial: TrialRecord, trials: list[TrialRecord]) -> str:
        metric = self.sweep.metrics[0]
        sign = 1 if metric.goal == "minimize" else -1

        def values(run_id: str | None) -> list[float]:
            found = standing.reports(self.store, run_id, metric.name)
            return [float("inf") if math.isnan(value) else sign * value for value in found]

        mine = values(trial.run_id)
        return rule.stops(mine, [values(other.run_id) for other in trials if other is not trial]) if mine else ""

    def _cancel(self, trials: list[TrialRecord], why: str) -> None:
        """Cancel trials; the reason is stored first. A platform that does not answer is asked again by the watcher."""
        for trial in trials:
            if trial.stopped or trial.run_id is None:
                continue
            self.history.stop(self.sweep_id, trial.number, why)
            with contextlib.suppress(BackendError):
                Run(trial.run_id, self.store).cancel(take_over=True)

    # -- around them --------------------------------------------------------------------------------------------------

    def _care(self, live: list[TrialRecord]) -> None:
        """Start the watcher where it has died, with the environment that only this process and it have."""
        if self.store.clock.monotonic() - self._cared_at < CARE_S:
            return
        self._cared_at = self.store.clock.monotonic()
        for trial in live:
            if trial.run_id and not self.store.watched(trial.run_id):
                handover.start(self.store, self.store.attempts(trial.run_id)[-1].plan)
                return


def start(home: Path, sweep_id: str) -> None:
    """Start the process that drives a sweep, with this shell's environment, and store what may be stored of that.

    Returns at once; nothing is started where a process was a moment ago that has not taken its lease yet.
    """
    if handover.drive(home, sweep_id, os.environ):
        record = EnvironmentRecord(environment.pointers(os.environ), environment.hidden(os.environ, ()), ())
        Store(home).keep_environments({sweep_id: record})


def main() -> int:
    """Drive a sweep; see the module's docstring."""
    home, sweep_id = Path(sys.argv[1]), sys.argv[2]
    os.environ.update(json.loads(sys.stdin.read() or "{}"))  # in memory only: /proc shows what a process began with
    try:
        Driver(home, sweep_id).run()
    except StoreError as error:  # the watcher starts another process
        watch_log.write(f"{sweep_id}: {error}")
        return error.exit_code
    except CloudtrainError as error:
        watch_log.write(f"{sweep_id}: {error}")
        with contextlib.suppress(StoreError):
            SweepHistory(home).set_state(sweep_id, "FAILED", error.message, old=("RUNNING",))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Law 5: cancel is not success, and ends everything, at whatever moment it comes.

Every run has processes that are hard to find: in a session of their own, deaf to SIGTERM, with an empty environment. None
lives longer than LIFE_S, whatever happens. After every cancel the processes of the whole machine are looked through.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from tests.conftest import WAIT_S, wait_for
from tests.seed import first_seed

LIFE_S = 180
SHARDS, EACH = 4, 27
LATEST_S = 1.2  # a moment is so much later at most than what it waits for
# What a moment waits for: the stored intent, a run that the platform has but whose ranks cannot start yet, a running one.
MOMENTS = ("intended", "starting", "running")
SCRIPT = f"""
import os, signal, subprocess, sys, time
token, deaf = sys.argv[1:]
subprocess.Popen(["setsid", "env", "-i", "sleep", token])  # its mark is on its command line alone
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep({LIFE_S})
    os._exit(0)
if deaf == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep({LIFE_S})
"""


def left(*marks: str) -> list[str]:
    """Return the processes of this machine whose environment or command line holds one of the marks, ours excepted."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            words = command + b"\0" + (entry / "environ").read_bytes()
            state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
        except OSError:
            continue
        if int(entry.name) != os.getpid() and state not in b"ZX" and any(mark.encode() in words for mark in marks):
            found.append(f"{entry.name}: {command.replace(bytes(1), b' ').decode(errors='replace')[:200]}")
    return found


class Victim:
    """A run that is submitted by a thread, or by the real command line, and cancelled at a drawn moment after `since`."""

    def __init__(self, folder: Path, choose: random.Random, since: str, *, by_hand: bool) -> None:
        self.home, self.since = folder / "home", since
        self.token = f"{LIFE_S}.{choose.getrandbits(60):019d}"  # seconds that nobody else sleeps
        self.delay_s = LATEST_S * choose.random() ** 1.5
        self.source = folder / "source"
        self.source.mkdir(parents=True)
        (self.source / "victim.py").write_text(SCRIPT)
        world = {"num_nodes": choose.choice((1, 1, 2)), "processes_per_node": choose.choice((1, 2))}
        self.job = world | {
            "source": str(self.source),
            "entrypoint": "victim.py",
            "args": [self.token, choose.choice(("deaf", "hears"))],
            "limits": {"grace": "1s"},
            "retry": {"max_attempts": choose.choice((1, 3))},
        }
        if since == "starting":  # its ranks start after this, so it is starting whenever the cancel comes
            self.job["setup"] = f"trap '' TERM; setsid env -i sleep {self.token} & sleep {self.token}"
        self.by_hand = by_hand
        self.error: list[BaseException] = []

    def submit(self) -> None:
        try:
            if not self.by_hand:
                Submitter(home=self.home, watch=False).submit(self.job)
                return
            words = [f"--set={key}={self.job[key]}" for key in ("num_nodes", "processes_per_node")]
            words += [f"--set=retry.max_attempts={self.job['retry']['max_attempts']}", "--set=limits.grace=1s"]
            if setup := self.job.get("setup"):
                words.append(f"--set=setup={setup}")
            subprocess.run(
                [sys.executable, "-m", "cloudtrain.cli", "submit", "victim.py", *words, "--", *self.job["args"]],
                cwd=self.source,
                env={**os.environ, "CLOUDTRAIN_HOME": str(self.home)},
                capture_output=True,
                timeout=WAIT_S,
            )
        except BaseException as error:
            self.error.append(error)

    def far(self, run: Run) -> str:
        if not run.attempts[-1].handle:
            return "intended"
        return "running" if any(line.text == "up" for line in run.logs()) else "starting"

    def go(self) -> str:
        """Submit, cancel, and look at what is left; return how far the run had come."""
        submitting = threading.Thread(target=self.submit)
        submitting.start()
        store = Store(self.home)
        record = wait_for(lambda: self.error or store.runs(), "a run")[0]
        assert not self.error, self.error
        run = Run(record.run_id, store, watch=self.by_hand)
        wait_for(lambda: MOMENTS.index(self.far(run)) >= MOMENTS.index(self.since), self.since)
        time.sleep(self.delay_s)
        far = self.far(run)
        run.cancel()
        status = run.wait(WAIT_S)
        assert status.state is State.CANCELLED, (status, [line.text for line in run.logs()][-10:])
        submitting.join(WAIT_S)
        assert not submitting.is_alive() and not self.error, self.error
        wait_for(lambda: not left(str(self.home), self.token), f"the end of {left(str(self.home), self.token)}")
        assert [attempt.status.state for attempt in run.attempts] == [State.CANCELLED], "no attempt follows a cancel"
        return far


@pytest.mark.parametrize("shard", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, SHARDS))])
def test_cancelled_at_random_moments(tmp_path, figure, shard):
    cancel_all(tmp_path, figure, shard, first_seed() + shard)


def cancel_all(tmp_path, figure, shard, seed):
    choose = random.Random(seed)
    moments = choose.sample(MOMENTS * (EACH // len(MOMENTS)), EACH)
    victims = [Victim(tmp_path / str(n), choose, moments[n], by_hand=n % 10 == shard) for n in range(EACH)]
    with ThreadPoolExecutor(4) as pool:
        reached = list(pool.map(Victim.go, victims))
    figure("runs cancelled, no process left after any", len(reached))
    for far in MOMENTS:
        assert far == "intended" or 3 * reached.count(far) >= EACH, reached
        figure(f"of them when the run was {far}", reached.count(far))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_cancelled_at_many_more_moments(tmp_path, figure, shard):
    for n in range(1, 11):
        cancel_all(tmp_path / str(n), figure, shard, first_seed() + n * SHARDS + shard)

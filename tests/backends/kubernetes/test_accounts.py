"""Two runs with two users' kubeconfigs in one home: one watcher, and no call of one run has the other's token."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching import workers
from cloudtrain.runs.watching.watch_all import HomeWatcher
from cloudtrain.simulators.http import Request, Response
from tests.conftest import WAIT_S, processes_of, wait_for
from tests.simulators.kubernetes_cluster.server import Cluster

pytestmark = pytest.mark.usefixtures("census")
SCRIPT = """
import pathlib, sys, time
print("there", flush=True)
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)
"""


class Recorder(Cluster):
    """A cluster with two users, that remembers with which token each call came."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[tuple[str, str]] = []
        super().__init__(folder)
        self.other = self.kubeconfig.with_name("other")
        self.other.write_text(self.kubeconfig.read_text().replace(self.token, "other-token"))

    def _authenticated(self, function: Callable[..., Response]) -> Callable[..., Response]:
        known = super()._authenticated(function)

        def response(request: Request, *groups: str) -> Response:
            token = request.headers.get("authorization", "").removeprefix("Bearer ")
            self.seen.append((token, f"{request.path} {request.body[:2000]!r}"))
            if token == "other-token":  # noqa: S105 - of a simulator
                request = replace(request, headers={**request.headers, "authorization": f"Bearer {self.token}"})
            return known(request, *groups)

        return response


def test_no_call_of_a_run_has_the_token_of_another(home: Path, tmp_path: Path) -> None:
    script, gate = tmp_path / "project" / "train.py", tmp_path / "gate"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (script.parent / "cloudtrain.toml").write_text(
        '[targets.here]\nbackend = "kubernetes"\nimage = "any:1"\npoll_s = 0.2\n'
    )
    with Recorder(tmp_path / "cluster") as cluster:
        plain = {name: value for name, value in os.environ.items() if name not in ("KUBECONFIG", "SSH_AUTH_SOCK")}
        shells = {
            "one": plain | {"KUBECONFIG": str(cluster.kubeconfig)},
            "again": plain | {"KUBECONFIG": str(cluster.kubeconfig), "SSH_AUTH_SOCK": "/tmp/agent.1"},
            "two": plain | {"KUBECONFIG": str(cluster.other)},
        }
        tokens = {"one": cluster.token, "again": cluster.token, "two": "other-token"}

        def command(env: dict[str, str], *words: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "cloudtrain.cli", *words],
                cwd=script.parent, env=env, capture_output=True, text=True, timeout=WAIT_S,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        def processes(worker: bool) -> list[int]:
            lines = [
                line
                for line in processes_of(home)
                if "runs.watching.watch_all" in line and ("--worker" in line) is worker
            ]
            return [int(line.partition(":")[0]) for line in lines]

        runs = {}
        for name, env in shells.items():
            sets = ["--set", "environment.requirements=none", "--new", "--json"]
            output = command(env, "submit", "train.py", "-t", "here", *sets, "--", str(gate))
            runs[name] = str(json.loads(output.splitlines()[-1])["run_id"])

        def users() -> dict[str, set[str]]:
            """Return the tokens of the calls that read each run's log, after those of its submit."""
            return {
                name: {token for token, text in cluster.seen[begun:] if run_id in text and "/log?" in text}
                for name, run_id in runs.items()
            }

        def are_read() -> bool:
            return all(users().values())

        begun = len(cluster.seen)
        wait_for(are_read, "their logs were read", 2 * WAIT_S)
        assert (len(processes(worker=False)), len(processes(worker=True))) == (1, 1), (
            "another agent is no other account"
        )

        (first,) = processes(worker=False)
        os.kill(first, signal.SIGKILL)
        begun = len(cluster.seen)
        command(plain, "show", runs["one"])  # this shell has neither
        wait_for(lambda: processes(worker=False) not in ([], [first]), "another watcher")
        wait_for(are_read, "their logs are read again", 2 * WAIT_S)
        gate.touch()
        for run_id in runs.values():
            command(plain, "wait", run_id)
        for name, run_id in runs.items():
            assert {token for token, text in cluster.seen if run_id in text} == {tokens[name]}


def test_a_worker_that_hangs_is_replaced_and_delays_no_other(home: Path, tmp_path: Path, monkeypatch) -> None:
    """The runs of the other account are asked for as before; those of its own go to another process."""
    gate, runs, watchers = tmp_path / "gate", {}, []
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(SCRIPT)
    with Recorder(tmp_path / "cluster") as cluster:
        messages = []
        for name, kubeconfig in (("two", cluster.other), ("one", cluster.kubeconfig)):
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
            submitter = Submitter("kubernetes", watch=False, image="any:1", poll_s=0.2)
            job = {"name": name, "source": str(source), "entrypoint": "train.py", "args": [str(gate)]}
            runs[name] = submitter.submit({**job, "environment": {"requirements": "none"}})
            runs[name].acknowledge()
            messages.append(
                {"do": "watch", "run": runs[name].run_id, "environ": dict(os.environ), "own": True, "sources": []}
            )

        def watch() -> None:
            watchers.append(HomeWatcher(home, dict(os.environ)))
            watchers[0].run(messages)

        def calls(run: Run) -> int:
            return sum(run.run_id in text for _, text in list(cluster.seen))

        def more_calls(run: Run, number: int) -> None:
            before = calls(run)
            wait_for(lambda: calls(run) >= before + number, "its platform is asked", 2 * WAIT_S)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        for run in runs.values():
            wait_for(lambda run=run: run.record.status.state is State.RUNNING, "its state", 2 * WAIT_S)
        (worker,) = watchers[0]._workers
        with Store(
            home
        ).database.write() as db:  # it is stopped outside its own transactions: they would lock the others out
            os.kill(worker.pid, signal.SIGSTOP)
            db.execute("UPDATE leases SET expires_at = 0 WHERE run_id = ?", (runs["two"].run_id,))
        stopped = calls(runs["two"])
        more_calls(runs["one"], 12)
        assert calls(runs["two"]) <= stopped + 4, "a call was under way"
        worker.alive_at -= workers.HANGS_S  # so much later
        more_calls(runs["two"], 4)
        assert [one.pid != worker.pid for one in watchers[0]._workers] == [True]
        gate.touch()
        for run in runs.values():
            wait_for(lambda run=run: run.record.status.state is State.SUCCEEDED, "its end", 2 * WAIT_S)
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert {token for token, text in cluster.seen if runs["two"].run_id in text} == {"other-token"}

"""Two runs with two users' credentials of one platform in one home: no call for one run is made as the other's user.

Kubernetes and SageMaker have the same through the command line (tests/backends/kubernetes/test_accounts.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from cloudtrain.backends.google import GoogleApi
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch_all import HomeWatcher
from cloudtrain.simulators.http import Request, Response, Server
from cloudtrain.simulators.vertex import server as vertex
from cloudtrain.simulators.vertex.lifecycle import Behavior
from tests.backends.test_google import Tokens
from tests.conftest import WAIT_S, wait_for
from tests.lab.connections import close_all
from tests.lab.network import Lab

pytestmark = pytest.mark.usefixtures("census")
USERS = ("one", "two")
SCRIPT = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)
"""
Calls = list[tuple[str, str]]  # user and text


class Platform(Protocol):
    """A platform that remembers who made which call."""

    backend: str
    options: dict[str, Any]
    shells: dict[str, dict[str, str]]  # the variables of each user
    gate: Path  # for scripts that run

    def calls(self) -> Calls: ...

    def mark(self, run: Run) -> str:
        """Return what is in the text of each call for a run."""
        ...

    def end(self, runs: list[Run]) -> None: ...


class SlurmCommands:
    """Slurm's commands as scripts, which note the configuration of their caller; jobs run nothing."""

    backend = "slurm"

    def __init__(self, folder: Path) -> None:
        self.gate, self._log, self._state = folder / "gate", folder / "calls", folder / "state"
        self.options = {"folder": str(folder / "shared"), "python": sys.executable}
        commands = folder / "commands"
        commands.mkdir()
        path = f"{commands}:{os.environ['PATH']}"
        self.shells = {user: {"SLURM_CONF": str(folder / user), "PATH": path} for user in USERS}
        self._state.write_text("PENDING")
        texts = {
            "sbatch": f"echo 1 >> {folder}/jobs; expr 7000000 + $(wc -l < {folder}/jobs)",
            "squeue": (
                "for word; do case $word in --jobs=*) jobs=$(echo ${word#*=} | tr , ' ');; esac; done\n"
                f'for job in $jobs; do echo "$job|$(cat {self._state})|None"; done'
            ),
        }
        for name, text in texts.items():
            (commands / name).write_text(f'#!/bin/sh\necho "$SLURM_CONF $*" >> {self._log}\n{text}\n')
            (commands / name).chmod(0o755)

    def calls(self) -> Calls:
        rows = [line.partition(" ") for line in self._log.read_text().splitlines()]
        return [(Path(config).name, text) for config, _, text in rows]

    def mark(self, run: Run) -> str:
        return Path(str(run.attempts[-1].handle), "job").read_text()

    def end(self, runs: list[Run]) -> None:
        self._state.write_text("CANCELLED")


class VertexProject:
    """A simulator at the address of Google's services, for this process and its children, with two service accounts."""

    backend = "vertex"
    options: dict[str, Any] = {
        "project": "local",
        "bucket": "local",
        "image": "any:1",
        "client": "rest",
        "settle_s": 0.1,
    }

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
        seen = self._seen = []

        class Recorder(Server):
            def _handle_request(self, request: Request) -> Response | None:
                user = request.headers.get("authorization", "").removeprefix("Bearer ")
                seen.append((user, f"{request.path} {request.body[:4096]!r}"))
                return super()._handle_request(request)

        patch.setattr(vertex, "Server", Recorder)
        self.gate = folder / "gate"
        self._simulator = stack.enter_context(vertex.Simulator(folder / "vertex", behavior=Behavior(execute=False)))
        url = self._simulator.url
        patch.setattr(GoogleApi, "url", lambda self, service: url)
        site = folder / "site"
        site.mkdir()
        text = f"from cloudtrain.backends.google import GoogleApi\nGoogleApi.url = lambda self, service: {url!r}\n"
        (site / "sitecustomize.py").write_text(text)
        self.shells = {}
        for user in USERS:
            tokens = Tokens(folder / f"{user}.json")
            tokens.answer["access_token"] = user
            stack.callback(tokens.server.shutdown)
            self.shells[user] = {
                "GOOGLE_APPLICATION_CREDENTIALS": str(tokens.key),
                "PYTHONPATH": str(site),
                "NO_PROXY": "*",
            }

    def calls(self) -> Calls:
        return list(self._seen)

    def mark(self, run: Run) -> str:
        return str(run.attempts[-1].handle).rpartition("/")[2]

    def end(self, runs: list[Run]) -> None:
        times = {"startTime": "2026-01-01T00:00:00Z", "endTime": "2026-01-01T00:00:01Z"}
        for run in runs:
            self._simulator.jobs.change(self.mark(run), state="JOB_STATE_SUCCEEDED", **times)


class SshHost:
    """A real host that takes two users' keys, which only their agents have, and writes down what each is used for."""

    backend = "ssh"

    def __init__(self, folder: Path, lab: Lab, stack: ExitStack) -> None:
        self.gate, self._host = lab.shared / f"gate-{folder.parent.name}", lab.hosts[0]
        access = {"user": "root", "known_hosts": str(lab.known_hosts), "python": sys.executable}
        self.options = {"hosts": [{"address": self._host.address}], **access}
        self.shells = {}
        keys = lab.folder / "authorized_keys"
        stack.callback(keys.write_text, keys.read_text())
        stack.callback(close_all)
        for user in USERS:
            key, agent = folder / f"{user}.key", folder / f"{user}.agent"
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
            process = subprocess.Popen(["ssh-agent", "-D", "-a", agent], stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            wait_for(agent.exists, "the agent's socket")
            self.shells[user] = {"SSH_AUTH_SOCK": str(agent)}
            subprocess.run(["ssh-add", "-q", key], env=os.environ | self.shells[user], check=True)
            command = f'command="tee -a /root/calls.{user} | sh -c \\"$SSH_ORIGINAL_COMMAND\\""'
            with keys.open("a") as file:
                file.write(f"{command} {key.with_suffix('.key.pub').read_text()}")

    def calls(self) -> Calls:
        paths = {user: self._host.path(f"/root/calls.{user}") for user in USERS}
        texts = {user: path.read_text("utf-8", "replace") for user, path in paths.items() if path.exists()}
        return [(user, line) for user, text in texts.items() for line in text.splitlines()]

    def mark(self, run: Run) -> str:
        return run.run_id

    def end(self, runs: list[Run]) -> None:
        self.gate.touch()


@contextmanager
def watching(home: Path, messages: list[dict[str, Any]]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=lambda: HomeWatcher(home, dict(os.environ)).run(messages), daemon=True)
    thread.start()
    yield thread
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.fixture(params=["slurm", "ssh", "vertex"])
def platform(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    folder = tmp_path / "platform"
    folder.mkdir()
    with ExitStack() as stack:
        if request.param == "slurm":
            yield SlurmCommands(folder)
        elif request.param == "ssh":
            yield SshHost(folder, request.getfixturevalue("lab"), stack)
        else:
            yield VertexProject(folder, monkeypatch, stack)


def test_no_call_for_a_run_is_made_as_the_user_of_another(platform: Platform, home, tmp_path, monkeypatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(SCRIPT)
    job = {
        "source": str(source),
        "entrypoint": "train.py",
        "args": [str(platform.gate)],
        "environment": {"requirements": "none"},
    }
    runs: dict[str, Run] = {}
    messages = []
    for user in reversed(USERS):  # the watcher's own process is the first user's
        for name, value in platform.shells[user].items():
            monkeypatch.setenv(name, value)
        runs[user] = Submitter(platform.backend, watch=False, **platform.options).submit({**job, "name": user})
        close_all()
        message = {"do": "watch", "run": runs[user].run_id, "environ": dict(os.environ), "own": True, "sources": []}
        messages.append(message)

    def users(user: str) -> list[str]:
        mark = platform.mark(runs[user])
        return [by for by, text in platform.calls() if mark in text]

    submitted = {user: len(users(user)) for user in USERS}
    with watching(home, messages):
        for user in USERS:
            wait_for(lambda user=user: len(users(user)) >= submitted[user] + 3, "calls for a run")
        platform.end(list(runs.values()))
        for run in runs.values():
            wait_for(lambda run=run: run.record.status.state.final, "its end")
    for user in USERS:
        assert set(users(user)) == {user}

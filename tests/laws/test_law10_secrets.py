"""Law 10: a secret lands nowhere: it is planted, a run is made to fail, be preempted and retried, and all is searched.

Searched are every file below the home (archives and packed manifests opened), every row of the store, everything that the
command line says, and, for as long as the run goes on, the command line and environment of every process of this machine.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.parse
import zlib
from collections import Counter
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from tests.conftest import WAIT_S, processes_of, wait_for

pytestmark = pytest.mark.usefixtures("census")
PROGRAM = [sys.executable, "-m", "cloudtrain.cli"]
SECRETS = {"PLANTED": 'pl4nted/s3cret+1 of "env"', "FILED": "f1led-s3cret-of-a-file", "BAIT": "b4it-of-another-name"}
# Says what it knows in every way that a careless script would, then waits for the test; the second attempt ends.
SCRIPT = """
import base64, json, logging, os, pathlib, sys, time
from urllib.parse import quote, urlencode
import cloudtrain_runtime as runtime
known = [os.environ[name] for name in ("TOKEN", "KEY", "SAME")]
assert known == json.loads(pathlib.Path("expected.json").read_text()[::-1]), "the ranks have them"
for value in known:
    print("token", value)
    print("url", "https://user:" + value + "@host", file=sys.stderr)
    print(repr({"a": value}), json.dumps([value]))
    logging.warning("with %s", value)
    runtime.emit("alarm", text=value)
    print(quote(value, safe=""), urlencode({"key": value}), json.dumps(json.dumps([value])))
    for user in ("", "a", "ab"):
        basic = (user + value + "\\n").encode()
        print("Authorization: Basic", base64.b64encode(basic).decode(), base64.urlsafe_b64encode(basic).decode())
        runtime.emit("alarm", text=base64.b64encode(basic).decode(), url="https://" + quote(user + value) + "@host")
    sys.stdout.write(value[:5]); sys.stdout.flush(); time.sleep(0.05); print(value[5:])
print("attempt", os.environ["CLOUDTRAIN_ATTEMPT"], flush=True)
deadline = time.monotonic() + 120
while os.environ["CLOUDTRAIN_ATTEMPT"] == "1" and time.monotonic() < deadline:
    time.sleep(0.02)
raise RuntimeError("failed with " + known[0])
"""
JOB = """
name: secret
entrypoint: leaky.py
num_nodes: 2
retry: {max_attempts: 3}
limits: {grace: 1s}
secrets:
  TOKEN: "env:PLANTED"
  KEY: ["env:NOT_THERE_AT_ALL", "file:FILE"]
  SAME: ["env:BAIT"]
"""


BASE64 = (base64.b64encode, base64.urlsafe_b64encode)


def forms(text: str) -> list[bytes]:
    """Return the ways in which a text may be written down."""
    plain = text.encode()
    urls = [urllib.parse.quote(text), urllib.parse.quote_plus(text), urllib.parse.quote(text, safe="")]
    # What base64 has of it behind no byte, one and two others: all but what they share a character with.
    coded = [encode(b"?" * at + plain)[4 * (at > 0) : -4] for encode in BASE64 for at in range(3)]
    return [plain, json.dumps(text)[1:-1].encode(), *(url.encode() for url in urls), *coded]


NEEDLES = [form for text in SECRETS.values() for form in forms(text)]


def holds(data: bytes) -> bool:
    return any(needle in data for needle in NEEDLES)


def opened(data: bytes) -> list[bytes]:
    """Return a file's content, and what is packed in it."""
    found = [data]
    if data[:2] == b"\x1f\x8b":
        found.append(gzip.decompress(data))
    pieces = re.findall(rb'CLOUDTRAIN_MANIFEST_\d+"?\W+([\w-]{40,})', data)
    if pieces:
        try:
            found.append(zlib.decompress(base64.urlsafe_b64decode(b"".join(pieces))))
        except (ValueError, zlib.error):
            found += [
                zlib.decompressobj().decompress(base64.urlsafe_b64decode(pieces[0] + b"=" * (-len(pieces[0]) % 4)))
            ]
    return found


class Searcher(threading.Thread):
    """Looks at every process of this machine, over and over, until it is told to stop."""

    def __init__(self, mine: set[int]) -> None:
        super().__init__(daemon=True)
        self.mine = mine  # the shells of the person, so to speak: commands that were started with the secret
        self.done = threading.Event()
        self.found: dict[str, str] = {}
        self.seen: set[int] = set()
        self.ranks = Counter()
        self.rounds = 0

    def run(self) -> None:
        while not self.done.is_set():
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    self.look(entry)
                except OSError:
                    continue
            self.rounds += 1
            self.done.wait(0.005)

    def look(self, entry: Path) -> None:
        pid = int(entry.name)
        command = (entry / "cmdline").read_bytes()
        environ = (entry / "environ").read_bytes()
        self.seen.add(pid)
        if holds(command):
            self.found[entry.name] = f"on the command line of {command!r}"
        if not holds(environ) or pid in self.mine:
            return
        if b"\0RANK=" in b"\0" + environ:
            self.ranks[pid] += 1
        elif (
            b"cloudtrain.cli" not in command
        ):  # a command's child, before it becomes another program, looks like itself
            self.found[entry.name] = f"in the environment of {command!r}"


def rows(home: Path) -> list[str]:
    """Return every row of every table as text."""
    with sqlite3.connect(home / "history.sqlite3") as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [repr(row) for table in tables for row in db.execute(f"SELECT * FROM {table}")]


def test_a_planted_secret_is_found_nowhere(home, tmp_path, figure):
    project = tmp_path / "project"
    project.mkdir()
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(SECRETS["FILED"] + "\n")
    (project / "leaky.py").write_text(SCRIPT)
    known = [SECRETS[name] for name in ("PLANTED", "FILED", "BAIT")]
    (project / "expected.json").write_text(json.dumps(known)[::-1])  # backwards: itself no leak
    (project / "job.yaml").write_text(JOB.replace("FILE", str(file)))
    env = {**os.environ, "PLANTED": SECRETS["PLANTED"], "BAIT": SECRETS["BAIT"]}
    told: list[bytes] = []
    searcher = Searcher(set())
    searcher.start()

    def command(*words: str, env: dict[str, str] = env) -> int:
        child = subprocess.Popen(
            [*PROGRAM, *words], cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        searcher.mine.add(child.pid)
        told.append(child.communicate(timeout=WAIT_S)[0])
        return child.returncode

    try:
        assert command("plan", "job.yaml", "-o", str(tmp_path / "plan.json")) == 0, told
        assert command("plan", "job.yaml", "--json") == 0
        assert command("submit", str(tmp_path / "plan.json")) == 0, told
        run = Run.find(home=home)

        def both() -> bool:
            lines = [line.text for line in run.logs()]
            assert not run.record.status.state.final, lines[-20:]
            return lines.count("attempt 1") == 2

        wait_for(both, "both ranks of attempt 1")
        handle = run.attempts[0].handle
        assert handle is not None
        supervisor = json.loads((Path(handle) / "node-1" / "status.json").read_text())["pid"]
        os.kill(supervisor, signal.SIGTERM)  # what a platform does; the watcher starts attempt 2 by itself
        assert run.wait(WAIT_S).state is State.FAILED
        assert [attempt.status.state for attempt in run.attempts] == [State.PREEMPTED, State.FAILED]
        assert command("wait") == 1
        for words in (
            ["show"],
            ["show", "--json"],
            ["logs"],
            ["logs", "--json"],
            ["ls", "--json"],
            ["metrics", "--json"],
        ):
            assert command(*words) == 0, told[-1]
        without = {name: text for name, text in env.items() if name != "PLANTED"}
        assert command("resume", run.run_id, env=without) == 2
        assert b"TOKEN" in told[-1]
        wrong = JOB.replace('"env:PLANTED"', json.dumps(SECRETS["PLANTED"])).replace("FILE", str(file))
        (tmp_path / "wrong.yaml").write_text(wrong)
        assert command("submit", str(tmp_path / "wrong.yaml")) == 2, "a value is no source, and is not repeated"
        wait_for(lambda: not processes_of(home), "the end of the watcher")
    finally:
        searcher.done.set()
        searcher.join(WAIT_S)
    assert not searcher.found, searcher.found
    assert len(searcher.ranks) >= 3, "the ranks themselves do have it"
    lines = [line.text for line in run.logs()]
    assert sum("***" in line for line in lines) >= 40, "masked, not left out"
    assert not [text for text in told if holds(text)]
    assert not holds((tmp_path / "plan.json").read_bytes())
    files = [path for path in home.rglob("*") if path.is_file()]
    assert not [path for path in files if any(map(holds, opened(path.read_bytes()))) or holds(str(path).encode())]
    names = {path.name for path in files}
    assert {"watch.log", "history.sqlite3", "log", "status.json", "request.json", "launcher.out"} <= names
    kept = rows(home)
    assert not [row for row in kept if holds(row.encode())]
    assert any("***" in row for row in kept), "events of the script are in the store, masked"
    figure("files searched", len(files))
    figure("rows searched", len(kept))
    figure("processes searched", len(searcher.seen))
    figure("times that all processes were searched", searcher.rounds)


def test_the_search_finds_what_is_there(tmp_path):
    """A search that finds nothing must be able to find something."""
    packed = base64.urlsafe_b64encode(zlib.compress(json.dumps({"env": SECRETS}).encode())).decode()
    for data in (
        gzip.compress(SECRETS["FILED"].encode()),
        json.dumps({"CLOUDTRAIN_MANIFEST_0": packed}).encode(),
        *(form for text in SECRETS.values() for form in forms(text)),
    ):
        assert any(map(holds, opened(data))), data
    searcher = Searcher(set())
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, "X": SECRETS["BAIT"]})
    try:
        searcher.start()
        deadline = time.monotonic() + WAIT_S
        while str(child.pid) not in searcher.found:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
        searcher.done.set()
        searcher.join(WAIT_S)
    assert Store(tmp_path / "home").runs() == []

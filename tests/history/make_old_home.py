"""Write a home with the installed cloudtrain, as a user would, and pack it: later versions must go on with it.

    git worktree add /tmp/old 53b05dd && cp -r tests/history /tmp/old/tests/ && cd /tmp/old && make setup
    .venv/bin/python -m tests.history.make_old_home tests/history/old_home_53b05dd.tar.gz

Everything is written below ROOT, so that this one path stands in the archive for wherever it is unpacked. `unpack`
replaces it by the new place: in text files and in the history's columns. It stays in logs, because the history remembers
how many bytes of a log it has read. No file of the source has it, so that the digests of the bundle stay true. The
interpreter is stored as ROOT/venv/bin/python, which `unpack` links to the environment that runs it.

The archive leaves out what any version makes anew from the bundles: the launcher's files in an attempt's source, caches.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path("/tmp/cloudtrain-old-home")
MADE_AGAIN = {".cloudtrain", ".cache", ".bytecode", "__pycache__"}
MTIME = 1_750_000_000
WAIT_S = 120.0

SCRIPT = '''\
"""Four steps, a checkpoint after each. The argument says what happens after the second step of the first attempt."""

import hashlib
import pathlib
import sys
import time

import cloudtrain_runtime as runtime

run = runtime.context()
runtime.install()
ours = hashlib.sha256()
for file in sorted(pathlib.Path(".cloudtrain").rglob("*.py")):
    ours.update(file.read_bytes())
newest = runtime.latest_checkpoint()
first = int(pathlib.Path(newest, "step").read_text()) + 1 if newest else 0
print(f"attempt {run.attempt} starts at step {first}, launcher {ours.hexdigest()[:16]}", flush=True)
for step in range(first, 4):
    runtime.log_metrics(step=step, loss=1 / 2**step)
    folder = pathlib.Path(run.checkpoint_dir, f"step-{step}")
    folder.mkdir()
    (folder / "step").write_text(str(step))
    runtime.complete_checkpoint(str(folder), step=step)
    print(f"step {step} saved", flush=True)
    if step == 1 and run.attempt == 1:
        if sys.argv[1] == "fail":
            import a_module_that_is_not_there
        end = time.monotonic() + {"go": 0, "slow": 5, "wait": 600}[sys.argv[1]]
        while time.monotonic() < end:
            time.sleep(0.05)
            if runtime.stop_requested():
                runtime.exit_resumable()
pathlib.Path(run.model_dir, "weights.txt").write_text("0.125\\n")
pathlib.Path(run.output_dir, "result.txt").write_text("done\\n")
print("done", flush=True)
'''
JOBS = {
    "finished": "go",
    "failed": "fail",
    "preempted": "wait",
    "cancelled": "wait",
    "retried": "wait",
    "attached": "go",
    "running": "wait",
    "unsent": "slow",
}
MORE = {"retried": "retry: {max_attempts: 2}\n"}
# A submit that dies between its intent and the first folder of its attempt, as under `kill -9`.
KILLED = """
import os, runpy, signal, sys
def hook(event, given):
    if event == "os.mkdir" and "/home/runs/" in str(given[0]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
sys.argv = ["cloudtrain", "submit", "unsent.yaml"]
runpy.run_module("cloudtrain", run_name="__main__")
"""


def main(archive: Path) -> None:
    """Write a home below ROOT, pack it as it is while one run goes on, then end that run and remove all."""
    ROOT.mkdir()  # fails where somebody else is at it
    try:
        (ROOT / "venv").symlink_to(sys.prefix)
        source = ROOT / "source"
        source.mkdir()
        (source / "train.py").write_text(SCRIPT)
        for name, word in JOBS.items():
            job = f"name: {name}\nentrypoint: train.py\nargs: [{word}]\n{MORE.get(name, '')}"
            (source / f"{name}.yaml").write_text(job)
        cloudtrain("submit", "finished.yaml", "--wait")
        cloudtrain("submit", "failed.yaml", "--wait", code=1)
        waiting("preempted")
        preempt("preempted")
        cloudtrain("wait", "preempted", code=75)
        waiting("cancelled")
        cloudtrain("cancel", "cancelled")
        cloudtrain("wait", "cancelled", code=130)
        waiting("retried")
        preempt("retried")
        cloudtrain("wait", "retried")
        cloudtrain("submit", "attached.yaml", "--set", f"output={ROOT / 'shared'}", "--wait", home="elsewhere")
        (shared,) = (ROOT / "shared").glob("attached-*")
        cloudtrain("attach", str(shared))
        waiting("running")
        killed = subprocess.run([python(), "-c", KILLED], cwd=source, env=environment("home"), check=False)
        assert killed.returncode == -signal.SIGKILL, killed.returncode
        pack(archive)
        cloudtrain("cancel", "running")
        cloudtrain("wait", "running", code=130)
    finally:
        shutil.rmtree(ROOT)
    print(f"{archive}: {archive.stat().st_size:,} bytes")


def python() -> str:
    return str(ROOT / "venv" / "bin" / "python")


def environment(home: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    mine = {"HOME": "user", "XDG_CONFIG_HOME": "config", "CLOUDTRAIN_CACHE": "cache", "CLOUDTRAIN_HOME": home}
    return kept | {name: str(ROOT / folder) for name, folder in mine.items()}


def cloudtrain(*words: str, code: int = 0, home: str = "home") -> str:
    done = subprocess.run(
        [python(), "-m", "cloudtrain", *words],
        cwd=ROOT / "source",
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def waiting(name: str) -> None:
    """Submit a job whose script waits after its second step, and return when the history has all of that."""
    cloudtrain("submit", f"{name}.yaml")
    until(lambda: "step 1 saved" in cloudtrain("logs", name))
    until(lambda: json.loads(cloudtrain("show", name, "--json"))["state"] == "RUNNING")
    until(lambda: len(cloudtrain("metrics", name, "--name", "loss", "--json").splitlines()) == 2)
    time.sleep(1)  # the watcher has then written its cursor


def preempt(name: str) -> None:
    """Do to a run on this machine what a platform does when it takes a node back."""
    handle = json.loads(cloudtrain("show", name, "--json"))["handle"]
    os.kill(json.loads(Path(handle, "node-0", "status.json").read_text())["pid"], signal.SIGTERM)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def pack(archive: Path) -> None:
    """Write ROOT's home, source and shared output into an archive: files sorted, of one time and owner."""
    copy = ROOT / "copy.sqlite3"
    with sqlite3.connect(ROOT / "home" / "history.sqlite3") as here, sqlite3.connect(copy) as there:
        here.backup(there)  # with what stands in the write-ahead log
    here.close()
    there.close()

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uid, member.gid, member.uname, member.gname = MTIME, 0, 0, "", ""
        return member

    with gzip.GzipFile(archive, "wb", 9, mtime=0) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        parts = [ROOT / "home", ROOT / "source", ROOT / "shared"]
        for path in sorted([*parts, *(path for part in parts for path in part.rglob("*"))]):
            inner = path.relative_to(ROOT)
            if MADE_AGAIN.isdisjoint(inner.parts) and not path.name.startswith("history.sqlite3"):
                tar.add(path, str(inner), recursive=False, filter=plain)
        tar.add(copy, "home/history.sqlite3", filter=plain)


def unpack(archive: Path, root: Path, host: str = "") -> Path:
    """Unpack a home below a folder, as if it had been written there by this machine (or `host`), and return the home."""
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")
    (root / "venv").symlink_to(sys.prefix)
    for path in root.rglob("*"):
        if path.is_file() and path.name != "log" and "logs" not in path.relative_to(root).parts:
            data = path.read_bytes()
            if bytes(ROOT) in data and not data.startswith(b"SQLite format 3\0"):
                path.write_bytes(data.replace(bytes(ROOT), bytes(root)))
    db = sqlite3.connect(root / "home" / "history.sqlite3")
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    for table in tables:
        for _, column, kind, *_ in db.execute(f"PRAGMA table_info({table})").fetchall():
            if kind == "TEXT":
                db.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (str(ROOT), str(root)))
    # A process is stored as host|boot|pid|start: of another host nobody can know whether it lives.
    for table in ("attempts", "leases"):
        owner = (host or socket.gethostname(),)
        db.execute(f"UPDATE {table} SET owner = ? || substr(owner, instr(owner, '|')) WHERE owner LIKE '%|%'", owner)
    db.commit()
    db.close()
    return root / "home"


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())

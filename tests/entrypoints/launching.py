"""Nodes of an attempt, started as a backend starts them: real launchers, real scripts, real signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from launcher import processes

from cloudtrain.backends.manifest import Manifest
from tests.conftest import WAIT_S, wait_for

ENTRYPOINTS = Path(__file__).resolve().parents[2] / "entrypoints"
# What the shell that runs the tests may have set for launchers of its own.
CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("CLOUDTRAIN_", "SLURM_", "SM_", "PET_"))
}


class Attempt:
    """An attempt with its nodes; `script` is the text of train.py. To be used with `with`: nothing outlives it."""

    def __init__(
        self,
        root: Path,
        script: str = "",
        *,
        nodes: int = 1,
        processes: int = 1,
        argv: tuple[str, ...] = ("train.py",),
        files: dict[str, str] | None = None,
        stdin: dict | None = None,
        environ: dict[str, str] | None = None,
        python: str = sys.executable,
        **manifest,
    ) -> None:
        self.root = root
        self.python = python
        self.stdin = stdin
        self.environ = environ or {}
        self.manifest = Manifest(
            run_id="run", attempt=1, argv=argv, nodes=nodes, processes_per_node=processes, **manifest
        )
        self.pieces = self.manifest.encode()
        self.folders = [root / f"node-{rank}" for rank in range(nodes)]
        for folder in self.folders:
            place = folder / "source" / ".cloudtrain"
            place.mkdir(parents=True)
            shutil.copy(ENTRYPOINTS / "launch.py", place)
            for package in ("launcher", "path"):
                shutil.copytree(ENTRYPOINTS / package, place / package)  # its bytecode too: no test compiles it again
            (place / "trainer").symlink_to(ENTRYPOINTS / "trainer")  # which no test changes
            shutil.copy(ENTRYPOINTS / "launcher" / "fence.py", place / "path" / "cloudtrain_fence.py")
            for name, text in {"train.py": script, **(files or {})}.items():
                file = folder / "source" / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
        self.launchers: dict[int, subprocess.Popen] = {}

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self.launchers.values():
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()
        for folder in self.folders:
            try:
                wait_for(lambda: not processes.marked(CLOUDTRAIN_NODE_DIR=str(folder)), "the end of every process", 60)
            finally:
                for pid in processes.marked(CLOUDTRAIN_NODE_DIR=str(folder)):
                    processes.kill(pid, signal.SIGKILL)

    def set(self, module: str, name: str, value: object) -> Attempt:
        """Change a constant of the launcher on all nodes: `set("usage", "EVERY_S", 0.5)`."""
        for folder in self.folders:
            path = folder / "source" / ".cloudtrain" / "launcher" / f"{module}.py"
            text, count = re.subn(rf"(?m)^{name} = [^ \n]+", f"{name} = {value}", path.read_text())
            assert count == 1, f"{module} has {count} constants {name}"
            path.write_text(text)
        return self

    def environment(self, rank: int) -> dict[str, str]:
        env = CLEAN | {
            "CLOUDTRAIN_ATTEMPT_ID": self.manifest.attempt_id,
            "CLOUDTRAIN_NODE_RANK": str(rank),
            "CLOUDTRAIN_NODE_DIR": str(self.folders[rank]),
            "CLOUDTRAIN_RUN_DIR": str(self.root / "run"),
            "CLOUDTRAIN_CACHE": str(self.root / "cache"),
            "CLOUDTRAIN_HOST": "127.0.0.1",
            "CLOUDTRAIN_GPUS": "",
        }
        env |= {f"CLOUDTRAIN_MANIFEST_{number}": piece for number, piece in enumerate(self.pieces)}
        if self.stdin is not None:
            env["CLOUDTRAIN_STDIN"] = "1"
        if rank:
            control = wait_for(lambda: (self.status(0) or {}).get("control"), "node 0's address")
            env["CLOUDTRAIN_CONTROL"] = f"{control['host']}:{control['port']}"
        return env | self.environ

    def start(self, *ranks: int) -> Attempt:
        """Start the launchers of these nodes, or of all."""
        for rank in ranks or range(len(self.folders)):
            command = [self.python, str(self.folders[rank] / "source" / ".cloudtrain" / "launch.py")]
            out = (self.folders[rank] / "launcher.out").open("ab")
            given = subprocess.PIPE if self.stdin is not None else subprocess.DEVNULL
            self.launchers[rank] = subprocess.Popen(
                command, env=self.environment(rank), stdin=given, stdout=out, stderr=out, start_new_session=True
            )
            if self.stdin is not None:
                self.launchers[rank].stdin.write(json.dumps(self.stdin).encode())
                self.launchers[rank].stdin.close()
        return self

    def wait(self) -> list[int]:
        """Wait for all launchers that were started and return their exit codes, by node."""
        return [self.launchers[rank].wait(WAIT_S) for rank in sorted(self.launchers)]

    def run(self) -> list[int]:
        return self.start().wait()

    def status(self, rank: int = 0) -> dict | None:
        try:
            return json.loads((self.folders[rank] / "status.json").read_text())
        except FileNotFoundError:
            return None

    def lines(self, node: int = 0) -> list[tuple[int, int, str, str]]:
        """Return (seq, rank, at, text) of every line in a node's log."""
        try:
            raw = (self.folders[node] / "log").read_bytes().decode()
        except FileNotFoundError:
            return []
        found = []
        for line in raw.split("\n")[:-1]:
            seq, rank, at, text = line.split(" ", 3)
            found.append((int(seq), int(rank), at, text))
        return found

    def texts(self, rank: int, node: int = 0) -> list[str]:
        return [text for _, at_rank, _, text in self.lines(node) if at_rank == rank]

    def events(self, kind: str, node: int = 0) -> list[dict]:
        mark = "::cloudtrain::"
        found = [json.loads(text[len(mark) :]) for text in self.texts(-1, node) if text.startswith(mark)]
        return [event for event in found if event["kind"] == kind]

    def heard(self, text: str, node: int = 0, times: int = 1) -> None:
        """Wait until ranks of a node have printed a line so many times."""
        wait_for(lambda: sum(line[3] == text for line in self.lines(node)) >= times, f"the line {text!r}")

    def guard(self, node: int = 0) -> int:
        return wait_for(lambda: self.status(node), "a status")["pid"]

    def supervisor(self, node: int = 0) -> int:
        """Return the supervisor proper: the guard's only child."""
        guard = self.guard(node)
        return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])

    def left(self) -> list[int]:
        """Return the processes of this attempt that live, whatever session they are in."""
        return [pid for folder in self.folders for pid in processes.marked(CLOUDTRAIN_NODE_DIR=str(folder))]

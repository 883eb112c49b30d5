"""Platforms of law 3 that lose answers: Kubernetes, Slurm, machines over SSH.

Kubernetes is the simulator with its faults. Slurm and sshd are real: Slurm's commands are wrapped, so that they lose an
answer before or after the real command ran, and questions over SSH are lost with their connection.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest

from cloudtrain.backends.http import TRIES
from cloudtrain.nodes import rpc, supervisor
from cloudtrain.simulators.http import Fault
from tests.backends.kubernetes.clusters import Ground
from tests.backends.ssh.test_backend import options
from tests.conftest import wait_for
from tests.lab.network import Lab
from tests.lab.slurm import Slurm


class Kubernetes:
    """The simulated cluster; its answers are lost five times in a row, which is when the client gives up."""

    backend = "kubernetes"

    def __init__(self, place: Ground) -> None:
        self.cluster = place.cluster
        self.options = {"kubeconfig": str(place.cluster.kubeconfig), "image": "any:1", "poll_s": 0.05}
        self.before = set(self.jobs())

    def lose(self, choose: random.Random) -> None:
        method, path = choose.choice([("POST", "/jobs$"), ("POST", "configmaps"), ("PATCH", "/jobs/")])
        self._fault(method, path, choose)

    def fail(self, choose: random.Random) -> None:
        calls = [("GET", "/jobs/"), ("GET", "/pods$"), ("GET", "/log"), ("GET", "/events")]
        calls += [("POST", "/jobs$"), ("POST", "configmaps"), ("PATCH", "/jobs/")]
        self._fault(*choose.choice(calls), choose)

    def _fault(self, method: str, path: str, choose: random.Random) -> None:
        status, times = choose.choice([0, 500, 503, 504, 429]), choose.choice([1, TRIES, TRIES, 2 * TRIES])
        after = status != 429 and choose.random() < 0.6
        self.cluster.faults.append(Fault(method, path, status, times=times, after=after, skip=choose.randint(0, 1)))

    def heal(self) -> None:
        self.cluster.faults.clear()

    def jobs(self) -> list[str]:
        names = [job["metadata"]["name"] for job in self.cluster.objects.all("jobs")]
        return [name for name in names if name not in getattr(self, "before", ())]

    def live(self) -> list[str]:
        return [job["metadata"]["name"] for job in self.cluster.objects.all("jobs") if self._lives(job)]

    def _lives(self, job: dict) -> bool:
        over = {c["type"] for c in job["status"].get("conditions") or () if c["status"] == "True"}
        return not job["spec"].get("suspend") and not over & {"Complete", "Failed"}

    def check(self) -> None:
        pass


WRAPPER = """#!/bin/bash
fault={faults}/{name}
for when in before after; do
  if [ -s "$fault.$when" ]; then
    left=$(($(cat "$fault.$when") - 1))
    if [ $left -gt 0 ]; then echo $left >"$fault.$when"; else rm "$fault.$when"; fi
    [ $when = after ] && {real} "$@" >/dev/null 2>&1
    echo "{name}: error: {said}" >&2
    exit 1
  fi
done
exec {real} "$@"
"""


class Cluster:
    """A real Slurm, behind commands that lose answers. Jobs wait in a queue that is closed, unless they are to run."""

    backend = "slurm"

    def __init__(self, slurm: Slurm, folder: Path, *, runs: bool) -> None:
        self.slurm, self.faults = slurm, folder / "faults"
        self.faults.mkdir(parents=True)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.options = {"folder": str(slurm.shared), "python": sys.executable}
        self.environ = {"PATH": f"{self.bin}:{os.environ['PATH']}"}
        for name in ("sbatch", "squeue", "scontrol", "scancel"):
            text = WRAPPER.format(
                faults=self.faults, name=name, real=f"/usr/bin/{name}", said="Socket timed out on send/recv operation"
            )
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        slurm.ask("scontrol", "update", "PartitionName=main", f"State={'UP' if runs else 'DOWN'}")
        self.before = set(self._rows())

    def lose(self, choose: random.Random) -> None:
        self._fault("sbatch", choose)

    def fail(self, choose: random.Random) -> None:
        for name in choose.choice(
            [["sbatch"], ["squeue"], ["scancel"], ["squeue", "scontrol"], ["squeue", "scontrol"]]
        ):
            self._fault(name, choose)

    def _fault(self, name: str, choose: random.Random) -> None:
        (self.faults / f"{name}.{choose.choice(['before', 'after'])}").write_text(str(choose.randint(1, 2)))

    def away(self) -> None:
        """The next job is made, and from then on nothing about jobs is answered."""
        for fault in ("sbatch.after", "squeue.before", "scontrol.before"):
            (self.faults / fault).write_text("1000000")

    def persist(self) -> None:
        """Let the faults last until `heal`."""
        for path in self.faults.iterdir():
            path.write_text("1000000")

    def heal(self) -> None:
        for path in self.faults.iterdir():
            path.unlink(missing_ok=True)  # its last one may end just now

    def _rows(self, *states: str) -> dict[str, str]:
        argv = ["/usr/bin/squeue", "--noheader", f"--states={','.join(states) or 'all'}", "--format=%i %j"]
        return dict(line.split(None, 1) for line in self.slurm.ask(*argv).splitlines())

    def jobs(self) -> list[str]:
        return [name.strip() for number, name in self._rows().items() if number not in self.before]

    def live(self) -> list[str]:
        names = [name.strip() for name in self._rows("PENDING", "RUNNING", "CONFIGURING").values()]
        return [name for name in names if not self._is_over(name)]

    def _is_over(self, name: str) -> bool:
        """Return whether the launcher of a job has ended: Slurm takes a moment longer to end its script."""
        run_id, _, number = name.rpartition("-a")
        node = self.slurm.shared / "runs" / run_id / f"a{number}" / "node-0"
        return (supervisor.read_status(node) or {}).get("state") in supervisor.FINAL

    def check(self) -> None:
        pass


class Machines:
    """Real machines whose connections break: before a question arrives, or behind it, when its answer is on its way."""

    backend = "ssh"

    def __init__(self, lab: Lab, hosts: int, patch: pytest.MonkeyPatch) -> None:
        self.lab, self.options = lab, options(lab, hosts)
        self.faults: list[tuple[str, bool, int]] = []  # operation ("" is any), whether it is done, how many pass before
        ask = rpc.RemoteAgent._ask

        async def asked(there: rpc.RemoteAgent, data: bytes) -> rpc.Answer:
            fault = self._fault(json.loads(data.partition(b"\n")[0])["operation"])
            if fault is None:
                return await ask(there, data)
            connection = await there.remote.connection()
            if fault:
                await ask(there, data)
            connection.abort()
            raise ConnectionResetError("the connection broke")

        patch.setattr(rpc.RemoteAgent, "_ask", asked)

    def _fault(self, operation: str) -> bool | None:
        for number, (name, after, skip) in enumerate(self.faults):
            if name in ("", operation):
                if skip:
                    self.faults[number] = (name, after, skip - 1)
                else:
                    del self.faults[number]
                    return after
                return None
        return None

    def lose(self, choose: random.Random) -> None:
        self.faults.append((choose.choice(["launch", "launch", "write", "extract"]), choose.random() < 0.6, 0))

    def fail(self, choose: random.Random) -> None:
        operation = choose.choice(["", "", "request", "begun", "prepare", "launch", "cancel", "report"])
        self.faults.append((operation, choose.random() < 0.6, choose.randint(0, 2)))

    def heal(self) -> None:
        self.faults.clear()

    def _firsts(self) -> list[Path]:
        """Return the folder of node 0 of every attempt, on whichever machines one was started."""
        found = [host.path("/root/.cloudtrain/runs").glob("*/a*/node-0/started") for host in self.lab.hosts]
        return [path.parent for paths in found for path in paths]

    def jobs(self) -> list[str]:
        return [_attempt_of(node) for node in self._firsts()]

    def live(self) -> list[str]:
        final = supervisor.FINAL
        return [_attempt_of(n) for n in self._firsts() if (supervisor.read_status(n) or {}).get("state") not in final]

    def check(self) -> None:
        for host in self.lab.hosts:
            wait_for(lambda host=host: not host.processes(containing="launch.py"), "the end of all processes")


AGENT = """#!{real}
import os, signal, sys

if not any("sys.stdin.buffer" in argument for argument in sys.argv[1:]):
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])


def cut_off():
    pid = os.getpid()
    while True:
        with open(f"/proc/{{pid}}/stat") as file:
            name, rest = file.read().rpartition(")")[::2]
        if "sshd" in name:
            os.kill(pid, signal.SIGKILL)
            os._exit(1)
        pid = int(rest.split()[1])


def failing(name, operation):
    def done(**arguments):
        for when in ("before", "after"):
            fault = {faults!r} + f"/{{name}}.{{when}}"
            if os.path.exists(fault):
                if when == "after":
                    operation(**arguments)
                if os.path.exists(fault + ".once"):
                    os.unlink(fault)
                cut_off()
        return operation(**arguments)

    return done


def serve(agent):
    for name, operation in list(agent.OPERATIONS.items()):
        agent.OPERATIONS[name] = failing(name, operation)
    agent.serve()


program = sys.stdin.buffer.read(int(sys.stdin.buffer.readline())).decode()
exec(program.replace("agent.serve()", "serve(agent)"), globals())
"""


class Hosts(Machines):
    """Real machines for clients that are processes: what runs there for a client cuts its connection."""

    def __init__(self, lab: Lab, hosts: int) -> None:
        self.lab, self.folder = lab, lab.shared / f"agent-{os.urandom(4).hex()}"
        (self.folder / "faults").mkdir(parents=True)
        python = self.folder / "python"
        python.write_text(AGENT.format(real=sys.executable, faults=str(self.folder / "faults")))
        python.chmod(0o755)
        self.options = options(lab, hosts, python=str(python))

    def lose(self, choose: random.Random) -> None:
        self._begin(choose.choice(["launch", "launch", "write", "extract"]), choose)

    def fail(self, choose: random.Random) -> None:
        self._begin(choose.choice(["request", "begun", "prepare", "launch", "cancel", "report", "read"]), choose)

    def _begin(self, operation: str, choose: random.Random) -> None:
        fault = self.folder / "faults" / f"{operation}.{choose.choice(['before', 'after'])}"
        Path(f"{fault}.once").touch()
        fault.touch()

    def away(self) -> None:
        """The next job is started, and from then on nothing about it is answered."""
        for fault in ("launch.after", "request.before", "begun.before"):
            (self.folder / "faults" / fault).touch()

    def persist(self) -> None:
        """Let the faults last until `heal`."""
        for path in (self.folder / "faults").glob("*.once"):
            path.unlink()

    def heal(self) -> None:
        for path in (self.folder / "faults").iterdir():
            path.unlink(missing_ok=True)  # it may end just now


def _attempt_of(node: Path) -> str:
    return f"{node.parts[-3]}-{node.parts[-2]}"

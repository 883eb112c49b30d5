"""What the command line costs beside torchx: --help, plan, import, a trivial script from submit to end, two ranks, the install.

    python benchmarks/startup.py [--rounds 9]
    python benchmarks/startup.py --roles [--rounds 9]    # only two roles beside a job of two nodes; nothing is installed

Either is installed as a user would, into a virtual environment of its own: torchx 0.7.0 on first use, cloudtrain's base
install at every run. The two ranks need torch, and run in the environment that this script is started with.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from measure import ROOT, Sample, interleaved, median, peer, process, report, spread, table

TWO_RANKS = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
assert dist.get_world_size() == 2
dist.destroy_process_group()
"""
NODES, TWO = "a job of two nodes", "two roles of a node each"
ROLES = "name: roles\nroles:\n  trainer: {entrypoint: hello.py}\n  server: {run: exec sleep 600}\n"
# The floor for two ranks: nothing but two interpreters with the five variables of env://.
SPAWN = """
import os, socket, subprocess, sys
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
def rank(n):
    env = dict(os.environ, RANK=str(n), LOCAL_RANK=str(n), WORLD_SIZE="2", OMP_NUM_THREADS="1")
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return subprocess.Popen([sys.executable, "ranks.py"], env=env)
sys.exit(max(child.wait() for child in [rank(0), rank(1)]))
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--roles", action="store_true")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    if arguments.roles:
        return beside_nodes(rounds)
    torchx = peer("torchx", "torchx==0.7.0").parent / "torchx"
    with_torch = Path(sys.executable).parent / "cloudtrain"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mebibytes, distributions = install(folder / "base")
        python, ours = folder / "base/bin/python", folder / "base/bin/cloudtrain"
        source = folder / "source"
        source.mkdir()
        (source / "hello.py").write_text("print('hello')\n")
        (source / "ranks.py").write_text(TWO_RANKS)
        (source / "spawn.py").write_text(SPAWN)
        (source / "job.yaml").write_text("name: bench\nentrypoint: hello.py\nhyperparameters: {lr: 0.1}\n")
        (source / "ranks.yaml").write_text(
            "name: ranks\nentrypoint: ranks.py\nprocesses_per_node: 2\nenv: {OMP_NUM_THREADS: 1}\n"
        )
        subprocess.run(["git", "init", "-q", str(source)], check=True)
        env = dict(os.environ, CLOUDTRAIN_HOME=str(folder / "home"), HOME=str(folder))

        def run(*argv: object) -> Sample:
            return process([str(part) for part in argv], env, source)

        dry = ["run", "-s", "local_cwd", "--dryrun", "utils.python", "--script", "hello.py", "--", "--lr", "0.1"]
        light = interleaved(
            {
                "python -c pass": lambda: run(python, "-c", "pass"),
                "import cloudtrain": lambda: run(python, "-c", "import cloudtrain"),
                "cloudtrain --help": lambda: run(ours, "--help"),
                "torchx --help": lambda: run(torchx, "--help"),
                "cloudtrain plan": lambda: run(ours, "plan", "job.yaml"),
                "torchx run --dryrun": lambda: run(torchx, *dry),
            },
            rounds,
        )
        ends = interleaved(
            {
                "cloudtrain submit --wait": lambda: run(ours, "submit", "job.yaml", "--wait"),
                "torchx run --wait": lambda: run(
                    torchx, "run", "-s", "local_cwd", "--wait", "utils.python", "--script", "hello.py"
                ),
            },
            rounds,
        )
        ranks = interleaved(
            {
                "two ranks, cloudtrain": lambda: run(with_torch, "submit", "ranks.yaml", "--wait"),
                "two ranks, bare env:// spawn": lambda: run(sys.executable, "spawn.py"),
            },
            rounds,
        )
        roles = measure_roles(ours, env, source, rounds)
    found = light | ends | ranks | roles
    body = table([(name, spread(samples, "cpu"), spread(samples, "wall")) for name, samples in found.items()],
                 ["command", "CPU s: median (min to max)", "wall s: median (min to max)"])  # fmt: skip
    body += f"\n\n{rounds} rounds, interleaved. Base install: {mebibytes:.1f} MiB in {distributions} distributions"
    body += " (with .pyc, without pip and setuptools)."

    def cpu(name: str) -> float:
        return median(found[name], "cpu")

    def wall(name: str) -> float:
        return median(found[name], "wall")

    gates = [
        ("--help, CPU, of torchx's", cpu("cloudtrain --help") / cpu("torchx --help"), 0.7),
        ("plan, CPU s", cpu("cloudtrain plan"), 0.25),
        (
            "import cloudtrain, CPU s over the bare interpreter",
            max(0.0, cpu("import cloudtrain") - cpu("python -c pass")),
            0.04,
        ),
        ("submit to end, wall, of torchx's", wall("cloudtrain submit --wait") / wall("torchx run --wait"), 0.45),
        (
            "two ranks, wall s over the bare spawn",
            wall("two ranks, cloudtrain") - wall("two ranks, bare env:// spawn"),
            0.3,
        ),
        roles_gate(roles),
        ("base install, MiB", mebibytes, 34.0),
        ("base install, distributions", distributions, 15),
    ]
    return report("startup", "Start-up and launch, beside torchx 0.7.0", body, gates)


def measure_roles(ours: Path, env: Mapping[str, str], source: Path, rounds: int) -> dict[str, list[Sample]]:
    """Return the times from submit to end of a job of two nodes, and of one of two roles of a node each."""
    (source / "nodes.yaml").write_text("name: nodes\nentrypoint: hello.py\nnum_nodes: 2\n")
    (source / "roles.yaml").write_text(ROLES)

    def submit(job: str) -> Sample:
        return process([str(ours), "submit", job, "--wait"], env, source)

    return interleaved({NODES: lambda: submit("nodes.yaml"), TWO: lambda: submit("roles.yaml")}, rounds)


def roles_gate(found: Mapping[str, list[Sample]]) -> tuple[str, float, float]:
    return "two roles, wall s over two nodes", median(found[TWO], "wall") - median(found[NODES], "wall"), 0.3


def beside_nodes(rounds: int) -> int:
    """Measure two roles beside two nodes, in the environment that this script is started with."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        source.mkdir()
        (source / "hello.py").write_text("print('hello')\n")
        env = dict(os.environ, CLOUDTRAIN_HOME=f"{name}/home", HOME=name)
        found = measure_roles(Path(sys.executable).parent / "cloudtrain", env, source, rounds)
    body = table([(name, spread(samples, "cpu"), spread(samples, "wall")) for name, samples in found.items()],
                 ["job on `local`, from submit to end", "CPU s: median (min to max)", "wall s: median (min to max)"])  # fmt: skip
    return report(
        "roles", "Two roles beside two nodes", f"{body}\n\n{rounds} rounds, interleaved.", [roles_gate(found)]
    )


def install(into: Path) -> tuple[float, int]:
    """Install the base package into a new environment and return its MiB and its number of distributions."""
    subprocess.run([sys.executable, "-m", "venv", str(into)], check=True)
    site = next(into.glob("lib/python*/site-packages"))

    def kibibytes() -> int:
        return int(
            subprocess.run(["du", "-sk", str(site)], capture_output=True, text=True, check=True).stdout.split()[0]
        )

    before = kibibytes()
    pip = [str(into / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", "-c", str(ROOT / "constraints.txt"), str(ROOT)], check=True)
    shown = subprocess.run([*pip, "list", "--format=freeze"], capture_output=True, text=True, check=True).stdout
    names = [line for line in shown.splitlines() if not line.startswith(("pip=", "setuptools="))]
    return (kibibytes() - before) / 1024, len(names)


if __name__ == "__main__":
    sys.exit(main())

"""What SSH costs: from submit to the script's first line, shipping changed files beside tar, the logs of 64 machines.

    python benchmarks/ssh.py [--rounds 5] [--nodes 64] [--lines 1000000]

An sshd of its own on the loopback; the 64 machines are 64 of its addresses, each with a connection and an agent of its
own. The network costs nothing here: what is measured is our own work over bare SSH.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import Sample, interleaved, median, report, spread, table

from cloudtrain.nodes import logs as node_logs
from cloudtrain.nodes import ssh as connections
from cloudtrain.nodes import transfer
from cloudtrain.nodes.rpc import RemoteAgent, remote_log_reader
from cloudtrain.nodes.ssh import Host
from cloudtrain.source.bundle import Bundle

FILES, FILE_BYTES = 400, 11_000
FIRST = "import time\nprint(f'first {time.time()}', flush=True)\n"


def close_all() -> None:
    """Close every connection of this process."""
    for machine in list(connections._MACHINES.values()):
        machine.close()
    connections._MACHINES.clear()


@contextmanager
def server(folder: Path) -> Iterator[int]:
    """Run an sshd on all loopback addresses and yield its port; `me` is a key that it accepts, `known` knows its own."""
    for name in ("host", "me"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 0.0.0.0\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/me.pub\nMaxStartups 200\n"
    )
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text("".join(f"[127.0.0.{n}]:{port} {key}" for n in range(1, 255)))
    Path("/run/sshd").mkdir(exist_ok=True)
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    process = subprocess.Popen([sshd, "-D", "-f", str(folder / "config"), "-E", str(folder / "log")])
    try:
        while subprocess.run(ssh(folder, port, "true"), capture_output=True, check=False).returncode != 0:
            time.sleep(0.05)
        yield port
    finally:
        close_all()
        process.terminate()
        process.wait()


def ssh(folder: Path, port: int, command: str) -> list[str]:
    options = [
        "-F",
        "none",
        "-i",
        str(folder / "me"),
        "-o",
        f"UserKnownHostsFile={folder}/known",
        "-o",
        "BatchMode=yes",
    ]
    return ["ssh", *options, "-p", str(port), "127.0.0.1", command]


def host(folder: Path, port: int, number: int = 1) -> Host:
    return Host(f"127.0.0.{number}", port, identity=str(folder / "me"), known_hosts=str(folder / "known"))


def timed(work: object) -> Sample:
    wall, cpu = time.perf_counter(), time.process_time()
    work()  # type: ignore[operator]
    return Sample(time.perf_counter() - wall, time.process_time() - cpu)


def first_line(folder: Path, port: int, rounds: int) -> dict[str, list[Sample]]:
    """Measure a bare command, and the way from `cloudtrain submit` to what the script says first."""
    source, configuration = folder / "first", folder / "configuration"
    source.mkdir()
    configuration.mkdir()
    (source / "first.py").write_text(FIRST)
    (source / "job.yaml").write_text("name: first\nentrypoint: first.py\nenvironment: {requirements: none}\n")
    access = f'identity = "{folder}/me"\nknown_hosts = "{folder}/known"\npython = "{sys.executable}"\n'
    (configuration / "cloudtrain.toml").write_text(
        f'[targets.bench]\nbackend = "ssh"\ndirectory = "{folder}/there"\n{access}port = {port}\n'
        'hosts = [{address = "127.0.0.1"}]\n'
    )
    env = dict(os.environ, CLOUDTRAIN_HOME=str(folder / "home"), CLOUDTRAIN_CONFIG_HOME=str(configuration))
    program = [sys.executable, "-m", "cloudtrain.cli"]

    def submit() -> Sample:
        began = time.time()
        command = [*program, "submit", "job.yaml", "-t", "bench", "--wait", "--json", "--new"]
        done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"the submit ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        run_id = json.loads(done.stdout.splitlines()[0])["run_id"]
        log = (folder / "there" / "runs" / run_id / "a1" / "node-0" / "log").read_text()
        said = next(line for line in log.splitlines() if " first " in line)
        return Sample(float(said.split()[-1]) - began, 0.0)

    def bare() -> Sample:
        return timed(lambda: subprocess.run(ssh(folder, port, "true"), check=True))

    return interleaved({"ssh HOST true": bare, "cloudtrain submit, to the script's first line": submit}, rounds)


def shipping(folder: Path, port: int, rounds: int) -> tuple[dict[str, list[Sample]], bool]:
    """Measure what 400 changed files take by tar and by us, each over a new connection; and whether none go twice."""
    source = folder / "source"
    source.mkdir()
    number = iter(range(10_000))
    there = RemoteAgent(host(folder, port), sys.executable)
    root = str(folder / "shipped")

    def change() -> int:
        n = next(number)
        for file in range(FILES):
            (source / f"file-{file}.py").write_bytes(os.urandom(FILE_BYTES // 2).hex().encode())
        return n

    def tar() -> Sample:
        into = f"{folder}/tar-{change()}"
        pipe = f"tar -C {source} -czf - . | {' '.join(ssh(folder, port, f'mkdir {into} && tar -C {into} -xzf -')[:-1])}"
        command = f"{pipe} 'mkdir {into} && tar -C {into} -xzf -'"
        return timed(lambda: subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True))

    def ours() -> Sample:
        into = f"{folder}/ours-{change()}"
        close_all()

        def work() -> None:
            bundle = Bundle.make(source, folder / "bundles")
            transfer.send_bundle(there, root, bundle)
            there.ask("extract", root=root, sha256=bundle.sha256, into=into)

        sample = timed(work)
        assert len(os.listdir(into)) == FILES + 1
        return sample

    found = interleaved({"tar -cz | ssh tar -xz": tar, "cloudtrain, packaging included": ours}, rounds)
    bundle = Bundle.make(source, folder / "bundles")
    run = {"root": root, "run": "again", "attempt": 1, "sha256": bundle.sha256}
    return found, bool(there.ask("prepare", **run).value["bundle"])


def logs(folder: Path, port: int, count: int, lines: int) -> tuple[Sample, int]:
    """Measure the logs of `count` machines in one; the CPU seconds are ours alone. Returns how many lines came, too."""
    each = lines // count
    places = []
    for node in range(count):
        path = folder / "logs" / f"{node}"
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as log:
            for n in range(each):
                at = f"2026-01-01T{n // 3_600_000:02d}:{n // 60_000 % 60:02d}:{n // 1000 % 60:02d}.{n % 1000:03d}{node:03d}Z"
                log.write(f"{n} {node} {at} step {n} loss 3.14159 and some more words as scripts print them\n")
        places.append((RemoteAgent(host(folder, port, node + 1), sys.executable), str(path)))
    for there, path in places:
        there.ask("read", path=path, limit=1)  # connected, its agent running
    seen = [0] * count

    def read() -> None:
        for line in node_logs.merge(remote_log_reader(places, set()), count):
            assert line.seq == seen[line.node], "a line is missing or comes twice"
            seen[line.node] += 1

    return timed(read), sum(seen)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--lines", type=int, default=1_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with server(folder) as port:
            begun = first_line(folder, port, arguments.rounds)
            shipped, kept = shipping(folder, port, arguments.rounds)
            read, came = logs(folder, port, arguments.nodes, arguments.lines)
    wanted = arguments.lines // arguments.nodes * arguments.nodes
    if came != wanted:
        sys.exit(f"{came:,} lines came out of {wanted:,}")
    rows = [(what, spread(samples, "wall")) for what, samples in (begun | shipped).items()]
    body = table(rows, ["what", "wall s: median (min to max)"])
    body += f"\n\n{arguments.rounds} rounds, interleaved; {FILES} files of {FILE_BYTES:,} bytes, all changed, new connections."
    body += f"\n{came:,} lines of {arguments.nodes} machines, all of them counted in order: {came / read.wall:,.0f} lines/s by"
    body += f"\nthe clock with all machines on this one, {came / read.cpu:,.0f} by the reader's own CPU seconds."
    over = median(begun["cloudtrain submit, to the script's first line"], "wall") - median(
        begun["ssh HOST true"], "wall"
    )
    ratio = median(shipped["cloudtrain, packaging included"], "wall") / median(shipped["tar -cz | ssh tar -xz"], "wall")
    return report(
        "ssh",
        "SSH machines",
        body,
        [
            ("submit to the script's first line, s over a bare ssh", over, 1.5),
            (f"{FILES} changed files, of tar over ssh", ratio, 1.2),
            ("times that unchanged source is shipped", 0.0 if kept else 1.0, 0.0),
            (f"CPU s of the reader for 100,000 lines of {arguments.nodes} machines", 100_000 * read.cpu / came, 1.0),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())

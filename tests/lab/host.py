"""One machine of a lab."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.conftest import wait_for

INIT = Path(__file__).with_name("init.py")
REPOSITORY = Path(__file__).parents[2]
PRIVATE = ("/root", "/home", "/tmp", "/run", "/var/tmp", "/var/spool", "/var/log", "/dev/shm")
SYSTEM = ("sshd:", "/usr/sbin/sshd", "/usr/sbin/munged", "/usr/sbin/slurm", "slurmstepd: [", "until ip")
DISK_SIZE = "512m"
START_S = 60


class Namespace:
    """A switch or a host: a first process with namespaces of its own, which end with it."""

    def __init__(self, config: dict, folder: Path) -> None:
        path = folder / f"{config['hostname']}.json"
        path.write_text(json.dumps(config))
        with open(folder / f"{config['hostname']}.init", "ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(INIT), str(path)], stdin=-1, stdout=-1, stderr=errors, start_new_session=True
            )
        self.pid = int(self._said() or 0)  # of its PID 1, as we see it
        if not self.pid or self._said() != "ready":
            self.end()
            raise OSError(f"{config['hostname']} did not start: {Path(errors.name).read_text()}")

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def end(self) -> None:
        """Kill everything in it, and wait until it is gone."""
        if getattr(self, "pid", 0) and self._process.poll() is None:
            with suppress(ProcessLookupError):  # it could not build its namespaces: its errors say why
                os.kill(self.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(START_S)

    def net(self, *argv: str) -> None:
        """Run a command in its network, but with our files and PIDs."""
        command(["nsenter", f"--target={self.pid}", "--net", *argv])


class Host:
    """A machine: address, hostname, PIDs and disk of its own, and an sshd on port 22 that takes the lab's key.

    `/root` is its disk (a tmpfs of 512 MB that outlives a reboot), `/tmp` and a few more are its own too; everything
    else is the machine's root file system, read-only. The lab's `shared` folder is the same on all hosts.
    """

    def __init__(
        self, name: str, address: str, number: int, switch: Namespace, folder: Path, private_disk: str
    ) -> None:
        self.name, self.address = name, address
        self._number, self._switch, self._folder, self._disk = number, switch, folder, private_disk
        self._namespace: Namespace | None = None
        self._services: list[list[str]] = []
        self._keys = folder / f"{name}.key"
        command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self._keys)])
        self._boot()

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Its PID 1, as the test process sees it."""
        assert self._namespace is not None, f"{self.name} is off"
        return self._namespace.pid

    @property
    def on(self) -> bool:
        return self._namespace is not None

    @property
    def host_key(self) -> str:
        """Its public host key: `ssh-ed25519 AAAA...`."""
        return " ".join(self._keys.with_suffix(".key.pub").read_text().split()[:2])

    def new_host_key(self) -> None:
        """Give its sshd another key, as if somebody else answered at its address; takes effect now."""
        for path in (self._keys, self._keys.with_suffix(".key.pub")):
            path.unlink()
        command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(self._keys)])
        again = f"cp {self._keys} /run/sshd.key; exec /usr/sbin/sshd -f {self._folder}/{self.name}.sshd"
        self.run(["sh", "-c", f"kill $(cat /run/sshd.pid); while [ -e /run/sshd.pid ]; do sleep 0.02; done; {again}"])
        self._answers()

    # -- what one does with it ----------------------------------------------------------------------------------------

    def run(self, argv: Sequence[str], *, given: bytes = b"", check: bool = True, env: dict | None = None) -> str:
        """Run a command on it, not over the network, and return its output; raises AssertionError when it fails."""
        return command(["nsenter", f"--target={self.pid}", "--all", *argv], given=given, check=check, env=env)

    def serve(self, argv: Sequence[str]) -> None:
        """Start a daemon (a command that goes into the background by itself) now and at every boot."""
        self._services.append(list(argv))
        self.run(argv)

    def path(self, path: str) -> Path:
        """Return where a file of this host is for us: /proc/<pid>/root/<path>."""
        return Path(f"/proc/{self.pid}/root", path.lstrip("/"))

    def files(self, folder: str = "/root") -> list[str]:
        """Return the files below one of its folders, relative to it; what is mounted there is left out."""
        top = self.path(folder)
        found, device = [], top.stat().st_dev
        for at, folders, names in os.walk(top):
            folders[:] = [name for name in folders if os.lstat(os.path.join(at, name)).st_dev == device]
            found += [os.path.relpath(os.path.join(at, name), top) for name in names]
        return sorted(found)

    def clear(self) -> None:
        """Remove what a test has left on its disk; what is mounted there stays."""
        top = self.path("/root")
        for name in self.files():
            (top / name).unlink()
        device, own = top.stat().st_dev, []
        for at, folders, _ in os.walk(top):
            folders[:] = [name for name in folders if os.lstat(os.path.join(at, name)).st_dev == device]
            own += [Path(at, name) for name in folders]
        for folder in reversed(own):
            with suppress(OSError):  # one that leads to a mount
                folder.rmdir()

    def processes(self, *, containing: str = "") -> dict[int, str]:
        """Return pid (ours) -> command line of the processes on it but its PID 1 and its daemons; a census counts them."""
        mine, found = os.readlink(f"/proc/{self.pid}/ns/pid"), {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns" / "pid") != mine or int(entry.name) == self.pid:
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
            except OSError:
                continue
            system = line.startswith(SYSTEM)
            ending = state in (b"Z", b"X") or not line  # its memory is gone already, and with it what it was called
            if not ending and not system and containing in line:
                found[int(entry.name)] = line
        return found

    def kill(self, containing: str) -> None:
        """Kill processes by their command line until none is left: one that is killed may just have started another."""

        def gone() -> bool:
            found = self.processes(containing=containing)
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found

        wait_for(gone, f"the end of what contains {containing!r}")

    # -- what befalls it ----------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Pull its network cable: its processes go on."""
        self._switch.net("ip", "link", "set", f"p{self._number}", "down")

    def heal(self) -> None:
        """Put the cable back."""
        self._switch.net("ip", "link", "set", f"p{self._number}", "up")

    def power_off(self) -> None:
        """Kill everything on it at once; its disk stays."""
        if self._namespace is not None:
            self._namespace.end()
            self._namespace = None

    def reboot(self) -> None:
        """Power off and on again: another boot id, /tmp empty, /root and the host key as they were."""
        self.power_off()
        self._boot()

    def fill(self, leave: int = 0) -> None:
        """Fill its disk (/root) but for some bytes; `free` undoes it."""
        room = os.statvfs(self.path("/root"))
        size = room.f_bavail * room.f_frsize - leave
        with open(self.path("/root/.filler"), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))

    def free(self) -> None:
        self.path("/root/.filler").unlink(missing_ok=True)

    def _boot(self) -> None:
        name = self.name
        boot_id = self._folder / f"{name}.boot_id"
        boot_id.unlink(missing_ok=True)
        boot_id.write_text(f"{uuid.uuid4()}\n")
        sshd = self._folder / f"{name}.sshd"
        sshd.write_text(
            f"Port 22\nListenAddress {self.address}\nHostKey /run/sshd.key\nPidFile /run/sshd.pid\nUsePAM no\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"StrictModes no\nAuthorizedKeysFile {self._folder}/authorized_keys\nSubsystem sftp internal-sftp\n"
            "ClientAliveInterval 5\nClientAliveCountMax 3\nMaxStartups 100\nMaxSessions 100\nUseDNS no\nPrintMotd no\n"
            f"SetEnv SLURM_CONF={self._folder}/slurm.conf\n"
        )
        shared, here = str(self._folder / "shared"), str(self._folder)
        bound = [
            *((path, path, False) for path in self._needed()),
            (here, here, False),
            (shared, shared, True),
            (f"{here}/hosts", "/etc/hosts", False),
            (f"{here}/passwd", "/etc/passwd", False),  # ann and bob are users of all hosts
            (f"{here}/resolv.conf", "/etc/resolv.conf", False),  # nobody answers there: asking must fail at once
            ("/sys/fs/cgroup", "/sys/fs/cgroup", True),  # slurmd looks for it
            (str(boot_id), "/proc/sys/kernel/random/boot_id", False),
            (self._disk, "/root", True),
        ]
        # /root first: the others may lie in it
        bound.sort(key=lambda item: (item[1].count("/"), item[1]))
        connected = f"until ip addr show eth0 2>&1 | grep -q {self.address}; do sleep 0.02; done"
        ready = f"{connected}; mkdir -p /run/sshd; cp {self._keys} /run/sshd.key; exec /usr/sbin/sshd -D -e -f {sshd}"
        config = {
            "hostname": name,
            "disks_of": self._switch.pid,
            "private": [folder for folder in PRIVATE if os.path.isdir(folder)],
            "bound": bound,
            "start": [["sh", "-c", ready]],
            "log": "/var/log/sshd",
        }
        self._namespace = Namespace(config, self._folder)
        port, peer = f"p{self._number}", str(self._namespace.pid)
        mac = f"02:77:00:00:00:{self._number:02x}"  # a reboot changes no network card: others remember its number
        self._switch.net(
            *("ip", "link", "add", port, "type", "veth"), *("peer", "name", "eth0", "address", mac, "netns", peer)
        )
        self._switch.net("ip", "link", "set", port, "master", "br0", "up")
        net, gateway = f"{self.address}/24", self.address.rpartition(".")[0] + ".1"
        for line in f"link set lo up;addr add {net} dev eth0;link set eth0 up;route add default via {gateway}".split(
            ";"
        ):
            self._namespace.net("ip", *line.split())
        self._answers()
        for argv in self._services:
            self.run(argv)

    def _answers(self) -> None:
        """Wait until its sshd takes connections."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((self.address, 22), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, f"no sshd on {self.name}: {self.path('/var/log/sshd').read_text()}"
                time.sleep(0.02)

    @staticmethod
    def _needed() -> list[str]:
        """Return the folders that must be seen although they may lie below a private one: the code and its Python."""
        places = {str(REPOSITORY), sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])}
        hidden = [folder + "/" for folder in PRIVATE]
        covered = {place for place in places if place.startswith(tuple(hidden))}
        return sorted(place for place in covered if not any(place.startswith(f"{other}/") for other in covered))


def command(argv: Sequence[str], *, given: bytes = b"", check: bool = True, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it printed; raises AssertionError with its errors when it fails."""
    done = subprocess.run(argv, input=given, capture_output=True, env=env, check=False, timeout=300)
    assert not check or done.returncode == 0, (
        f"{' '.join(argv)}: {done.returncode}: {(done.stderr + done.stdout).decode()[-2000:]}"
    )
    return done.stdout.decode("utf-8", "replace")

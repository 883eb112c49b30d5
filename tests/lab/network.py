"""A lab: a switch, hosts on it, and a leg of this machine in their network."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.lab.host import DISK_SIZE, Host, Namespace, command

ROOT = Path("/tmp/cloudtrain-lab")
USERS = "".join(f"{name}:*:{uid}:{uid}::/home/{name}:/bin/bash\n" for name, uid in (("ann", 61001), ("bob", 61002)))
LABS = 200  # how many there may be at a time: one for each worker of each test run on this machine


class Lab:
    """Hosts `node-1`, `node-2`, ... on a network 10.77.N.0/24, where this machine is 10.77.N.1.

    N is free when the lab is made, and locked as long as this process lives. Nothing outlives this process: the hosts
    end when it does, be it killed, and the next lab removes the files.

    folder        this lab's files: keys, known_hosts; hosts see it at the same path, read-only
    shared        a folder that all hosts see and may write, at the same path as here: a shared file system
    key           private key that root, ann and bob on every host accept; known_hosts: the hosts' keys by address
    """

    def __init__(self, hosts: int = 3) -> None:
        self.number, self._lock = _free_number()
        self.folder = ROOT / str(self.number)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.shared = self.folder / "shared"
        self.shared.mkdir(parents=True)
        self.key, self.known_hosts = self.folder / "id", self.folder / "known_hosts"
        names = [f"node-{number}" for number in range(1, hosts + 1)]
        addresses = {name: f"10.77.{self.number}.{10 + number}" for number, name in enumerate(names, 1)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "passwd").write_text(Path("/etc/passwd").read_text() + USERS)
        command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(self.key)])
        shutil.copy(self.key.with_suffix(".pub"), self.folder / "authorized_keys")
        self.hosts: list[Host] = []
        disks = {name: str(self.folder / "disks" / name) for name in names}
        self._leg = f"ctlab{self.number}"
        subprocess.run(["ip", "link", "del", self._leg], capture_output=True, check=False)
        self._switch = Namespace(
            {
                "hostname": f"switch-{self.number}",
                "disks": [(disk, DISK_SIZE) for disk in disks.values()],
                "start": [],
                "log": "/dev/null",
            },
            self.folder,
        )
        try:
            self._connect()
            for number, name in enumerate(names, 1):
                self.hosts.append(Host(name, addresses[name], number, self._switch, self.folder, disks[name]))
        except BaseException:
            self.close()
            raise
        self.write_known_hosts()

    def __getitem__(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def write_known_hosts(self) -> None:
        """Write the hosts' present keys down, as a person does who has seen them."""
        self.known_hosts.write_text("".join(f"{host.address} {host.host_key}\n" for host in self.hosts))

    def ssh(self, host: Host, argv: Sequence[str]) -> str:
        """Run a command on a host through OpenSSH's own client; raises AssertionError when it fails."""
        options = [f"UserKnownHostsFile={self.known_hosts}", "StrictHostKeyChecking=yes", "BatchMode=yes"]
        flags = [word for option in options for word in ("-o", option)]
        return command(["ssh", "-F", "none", "-i", str(self.key), *flags, f"root@{host.address}", *argv])

    def mend(self) -> None:
        """Put everything back: cables in, hosts on, disks freed, the keys known. For the end of a test."""
        for host in self.hosts:
            if not host.on:
                host.reboot()
            host.heal()
            host.free()
        self.write_known_hosts()

    def close(self) -> None:
        """End all hosts and remove the lab's files."""
        for host in self.hosts:
            host.power_off()
        self._switch.end()
        subprocess.run(["ip", "link", "del", self._leg], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _connect(self) -> None:
        """Make the bridge, and the cable from it to this machine.

        The bridge has a network of its own: in the machine's, Docker's packet filter would drop what hosts say to each
        other.
        """
        self._switch.net("ip", "link", "add", "br0", "type", "bridge")
        self._switch.net("ip", "link", "set", "br0", "up")
        peer = str(self._switch.pid)
        command(["ip", "link", "add", self._leg, "type", "veth", "peer", "name", "p0", "netns", peer])
        self._switch.net("ip", "link", "set", "p0", "master", "br0", "up")
        command(["ip", "addr", "add", f"10.77.{self.number}.1/24", "dev", self._leg])
        command(["ip", "link", "set", self._leg, "up"])


def _free_number() -> tuple[int, int]:
    """Return a number that no living process uses, and the descriptor that keeps it locked.

    What killed processes have left under other numbers is removed.
    """
    ROOT.mkdir(mode=0o755, exist_ok=True)
    mine = next(((number, lock) for number in range(1, LABS) if (lock := _locked(number)) is not None), None)
    if mine is None:
        raise OSError(f"{LABS} labs are in use: see {ROOT}")
    for stale in [path for path in ROOT.iterdir() if path.is_dir() and path.name != str(mine[0])]:
        if (lock := _locked(int(stale.name))) is not None:
            shutil.rmtree(stale, ignore_errors=True)
            os.close(lock)
    return mine


def _locked(number: int) -> int | None:
    lock = os.open(ROOT / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except BlockingIOError:
        os.close(lock)
        return None

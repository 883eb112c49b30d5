"""A real Slurm on a lab's hosts: slurmctld and munged on the first, which is the login node, a slurmd on each other."""

from __future__ import annotations

import os
import time

from tests.lab.host import command
from tests.lab.network import Lab

START_S = 60
CONFIG = """\
ClusterName=lab
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket},cred_expire=5
CryptoType=crypto/munge
StateSaveLocation=/root/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdSpoolDir=/var/spool/slurmd
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile=/var/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
KillWait=30
MinJobAge=300
InactiveLimit=0
GresTypes=gpu
Licenses=solver:1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=UNLIMITED State=UP PriorityTier=5 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=UNLIMITED State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=UNLIMITED State=UP PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """slurmctld on `login`, slurmd on the compute nodes; partitions main, low (may be preempted by high) and high.

    Without `accounting` no slurmdbd: sacct does not answer, and nothing limits an account. `environ` is what a client on
    this machine needs to ask this Slurm.
    """

    def __init__(self, lab: Lab, *, accounting: bool = False) -> None:
        self.lab = lab
        self.login, *self.nodes = lab.hosts
        self.shared = lab.shared / "slurm"
        self.shared.mkdir()
        self.config = lab.folder / "slurm.conf"
        socket, key = lab.shared / "munge.socket", lab.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        nodes = [
            f"NodeName={host.name} NodeAddr={host.address} CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN"
            for host in self.nodes
        ]
        gres = lab.folder / "gpus"
        gres.mkdir()
        for number in range(2):
            (gres / f"gpu{number}").touch()
        (lab.folder / "gres.conf").write_text(f"Name=gpu File={gres}/gpu[0-1]\n")
        self.config.write_text(
            CONFIG.format(head=self.login.name, address=self.login.address, socket=socket, nodes="\n".join(nodes))
        )
        self.environ = {"SLURM_CONF": str(self.config)}
        munged = [
            "/usr/sbin/munged",
            "--force",
            f"--socket={socket}",
            f"--key-file={key}",
            "--pid-file=/run/munged.pid",
        ]
        munged += ["--log-file=/var/log/munged.log", "--seed-file=/root/munged.seed"]
        self.login.serve(munged)
        if accounting:
            self._account(str(socket))
        conf = f"SLURM_CONF={self.config}"
        self.login.serve(["env", conf, "sh", "-c", "mkdir -p /root/slurmctld; exec /usr/sbin/slurmctld"])
        for host in self.nodes:
            host.serve(["env", conf, "sh", "-c", "mkdir -p /var/spool/slurmd; exec /usr/sbin/slurmd"])
        self.ready()

    def _account(self, munge_socket: str) -> None:
        """Start MariaDB and slurmdbd on the login node; limits of qualities of service hold for all of lab's account."""
        folder = self.lab.folder / "accounting"
        folder.mkdir()
        made = (
            "mariadb-install-db --no-defaults --datadir=/root/database --user=root --skip-test-db > /var/log/database"
        )
        server = "/usr/sbin/mariadbd --no-defaults --datadir=/root/database --user=root --skip-grant-tables --port=3306"
        server += " --bind-address=127.0.0.1 --socket=/root/database/socket --pid-file=/root/database/pid"
        self.login.serve(["sh", "-c", f"{made} 2>&1; setsid {server} >> /var/log/database 2>&1 < /dev/null &"])
        (folder / "slurmdbd.conf").touch(mode=0o600)
        (folder / "slurmdbd.conf").write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={munge_socket}\nDbdHost={self.login.name}\nSlurmUser=root\n"
            f"DbdAddr={self.login.address}\nStorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\n"
            f"StorageUser=root\nStorageLoc=slurm\nPidFile=/run/slurmdbd.pid\nLogFile=/var/log/slurmdbd.log\n"
        )
        with self.config.open("a") as file:
            file.write(
                "AccountingStorageType=accounting_storage/slurmdbd\n"
                f"AccountingStorageHost={self.login.address}\nAccountingStorageEnforce=limits,qos\n"
                f"AccountingStoragePass={munge_socket}\n"
            )
        conf = ["env", f"SLURM_CONF={self.config}", "sh", "-c"]
        (self.lab.folder / "slurmdbd.conf").symlink_to(folder / "slurmdbd.conf")
        self.login.serve([*conf, "exec /usr/sbin/slurmdbd"])  # it waits for its database
        self._until(["sacctmgr", "-i", "add", "cluster", "lab"])
        for words in (["account", "lab"], ["user", "root", "account=lab"]):
            self.ask("sacctmgr", "-i", "add", *words)

    def _until(self, argv: list[str]) -> None:
        """Repeat a command until it succeeds."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.ask(*argv)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return

    def ask(self, *argv: str) -> str:
        """Run one of Slurm's commands from this machine."""
        return command(argv, env={**os.environ, **self.environ})

    def ready(self) -> None:
        """Wait until both nodes are idle: nothing runs, nothing is being ended."""
        deadline = time.monotonic() + START_S
        while True:
            states = command(
                ["sinfo", "-h", "-N", "-p", "main", "-o", "%T"], env={**os.environ, **self.environ}, check=False
            )
            if states.split() == ["idle"] * len(self.nodes):
                return
            assert time.monotonic() < deadline, f"Slurm's nodes are {states!r}:\n{self.logs()}"
            time.sleep(0.1)

    def mend(self) -> None:
        """End all jobs and bring the nodes back; raises AssertionError when a process is left on one."""
        self.lab.mend()
        self.ask("scancel", "--user=root")
        self.ready()
        deadline = time.monotonic() + START_S
        while left := {host.name: found for host in self.nodes if (found := host.processes())}:
            if time.monotonic() > deadline:
                for host in self.nodes:
                    host.reboot()
                raise AssertionError(f"left behind: {left}")
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the last lines of the daemons' logs."""
        paths = [self.login.path("/var/log/slurmctld.log"), *(host.path("/var/log/slurmd.log") for host in self.nodes)]
        return "\n".join(
            f"{path}:\n" + "\n".join(path.read_text().splitlines()[-15:]) for path in paths if path.exists()
        )

"""The first process of a lab's switch or host: makes the namespaces, is their PID 1, and ends when its lifeline does.

    python init.py CONFIG.json        run as root; CONFIG.json says what to mount and start

The one who started it holds the other end of standard input. When that closes, however it came about, PID 1 leaves and
the kernel ends every process of the namespaces and takes their interfaces and mounts with them: nothing can be left.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x20000000,
    0x40000000,
)
PR_SET_PDEATHSIG = 1
STAGE = "/mnt"  # where bound folders wait while what they lie in is covered
DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "zfs", "f2fs", "fuse", "9p", "virtiofs", "nfs", "nfs4")
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main() -> None:
    with open(sys.argv[1]) as file:
        config = json.load(file)
    if config.get("disks_of"):  # the disks outlive this host's boots: they are the switch's mounts
        with open(f"/proc/{config['disks_of']}/ns/mnt") as namespace:
            check(libc.setns(namespace.fileno(), CLONE_NEWNS), "setns")
    check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET), "unshare")
    child = os.fork()
    if child:
        os.write(1, b"%d\n" % child)  # its number as the one who started us sees it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os._exit(os.waitpid(child, 0)[1] and 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    build(config)
    for argv in config["start"]:
        log = os.open(config["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        os.close(log)
    os.write(1, b"ready\n")
    live()


def build(config: dict) -> None:
    """Give this mount namespace its own files: what is writable here, no other host can see."""
    socket.sethostname(config["hostname"])
    mount("--make-rprivate", "/")
    for disk, size in config.get("disks", ()):
        os.makedirs(disk, exist_ok=True)
        mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk)
    if not config.get("private"):
        return
    mount("-t", "tmpfs", "tmpfs", STAGE)
    staged = []
    for number, (source, at, writable) in enumerate(config["bound"]):
        if not os.path.exists(source):
            continue
        place = f"{STAGE}/{number}"
        touch(place, like=source)
        mount("--rbind" if writable else "--bind", source, place)
        if not writable:
            mount("-o", "remount,bind,ro", place)
        staged.append((place, at))
    for at in disks():
        try:
            mount("-o", "remount,bind,ro", at)
        except OSError:
            if at in disks():  # else a container of Docker has ended meanwhile, and its disk with it
                raise
    for folder in config["private"]:
        mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder)
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "sysfs", "sysfs", "/sys")  # shows this namespace's interfaces, not the machine's
    for place, at in staged:
        if not os.path.exists(at):
            touch(at, like=place)
        mount("--move", place, at)
    mount("-t", "tmpfs", "tmpfs", STAGE)


def disks() -> list[str]:
    """Return where real disks are mounted, outside of what is staged."""
    found = []
    with open("/proc/self/mountinfo") as file:
        for line in file:
            front, _, back = line.partition(" - ")
            at = front.split()[4].encode().decode("unicode_escape")
            if back.split()[0] in DISKS and not at.startswith(f"{STAGE}/"):
                found.append(at)
    return found


def touch(path: str, like: str) -> None:
    """Make an empty folder or file to mount on."""
    os.makedirs(path if os.path.isdir(like) else os.path.dirname(path), exist_ok=True)
    if not os.path.isdir(like):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


def live() -> None:
    """Reap what others leave to us until the lifeline closes."""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    while True:
        if poll.poll(200) and not os.read(0, 1):
            os._exit(0)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


if __name__ == "__main__":
    main()

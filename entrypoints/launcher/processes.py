"""Start processes, list descendants, adopt orphans (subreaper), kill a process tree.

Where the system has neither /proc nor prctl (macOS) descendants cannot be listed: only the process groups that we
started are ended there.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable

from .clock import SYSTEM, Clock

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_S = 30.0  # for which the end of descendants is awaited
HAS_PROC = os.path.exists("/proc/self/stat")


def _load_prctl() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        import ctypes

        prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
        return prctl
    except (ImportError, OSError, AttributeError):
        return None


_prctl = _load_prctl()


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent dies; False where the system cannot."""
    return _prctl is not None and _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def die_with_parent(parent: int) -> None:
    """Let this process be killed when its parent dies (Linux); ends it where the parent has died already."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(137)


def spawn(argv: list[str], env: dict[str, str], cwd: str, out: int) -> int:
    """Start argv as the leader of a session of its own and return its pid; raises OSError when it cannot be executed.

    Standard input is empty, both outputs are the descriptor `out`. The process is killed with this one (Linux).
    """
    read, write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            die_with_parent(parent)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(out, 1)
            os.dup2(out, 2)
            restore_signals()
            os.chdir(cwd)
            os.execvpe(argv[0], argv, env)
        except Exception as error:  # a ValueError where an argument holds a NUL
            os.write(write, str(getattr(error, "errno", None) or errno.EINVAL).encode())
        finally:
            os._exit(127)
    os.close(write)
    failed = os.read(read, 16)
    os.close(read)
    if failed:
        os.waitpid(pid, 0)
        number = int(failed)
        raise OSError(number, os.strerror(number), argv[0])
    return pid


def restore_signals() -> None:
    """Set the default action for what Python or a caller (nohup, a shell's &) has changed, and block nothing."""
    for number in (
        signal.SIGPIPE,
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGCHLD,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        signal.signal(number, signal.SIG_DFL)
    for name in ("SIGXFSZ",):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def seal_descriptors() -> None:
    """Keep what this process inherited (a lock, a terminal) from its children."""
    folder = "/proc/self/fd" if HAS_PROC else "/dev/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        names = [str(number) for number in range(3, 256)]
    for name in names:
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                pass  # the descriptor of the listing itself


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None when it is gone, or where /proc is absent."""
    fields = stat(pid)
    return int(fields[19]) if fields else None


def boot_id() -> str | None:
    """Return what changes with every boot of this machine; None where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return None


def stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the state on; None when there is none. b"Z" marks a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    return text[text.rindex(b")") + 2 :].split()  # the name in parentheses may hold anything


def descendants(root: int) -> dict[int, list[bytes]]:
    """Return the descendants of a process with the fields of their stat; empty where /proc is absent.

    Zombies are among them: one whose first thread has ended looks like that while its other threads run.
    """
    if not HAS_PROC or (root == os.getpid() and not has_children()):  # a list of all processes takes milliseconds
        return {}
    children: dict[int, list[int]] = {}
    stats = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat(int(name))):
            stats[int(name)] = fields
            children.setdefault(int(fields[1]), []).append(int(name))
    family = {}
    queue = list(children.get(root, ()))
    while queue:
        pid = queue.pop()
        if pid not in family:
            family[pid] = stats[pid]
            queue.extend(children.get(pid, ()))
    return family


def marked(**wanted: str) -> list[int]:
    """Return the living processes whose environment at their start held every NAME=value that is given.

    The last line of defence: it also finds what is left when both supervisor and guard were killed together.
    """
    marks = [f"{name}={value}".encode() for name, value in wanted.items()]
    pids = []
    for name in os.listdir("/proc") if HAS_PROC else ():
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = file.read().split(b"\0")
        except OSError:
            continue
        if all(mark in environment for mark in marks):
            state = stat(int(name))
            if state and state[0] not in (b"Z", b"X"):
                pids.append(int(name))
    return pids


def has_children() -> bool:
    """Return whether this process has a child, ended or not; a subreaper without one has no descendant."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def reap() -> tuple[list[tuple[int, int]], bool]:
    """Collect every child that has ended: (pid, wait status) of each, and whether any child is left.

    For a subreaper no child left means no descendant left.
    """
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended.append((pid, status))


def exit_code(status: int) -> int:
    """Return the exit code that a wait status stands for; a signal is 128 + its number."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def end_descendants(groups: tuple[int, ...] = (), clock: Clock = SYSTEM) -> list[tuple[int, int]]:
    """Kill every descendant of this process and return what was reaped, as `reap`; blocking, for at most END_S.

    All that a list shows are stopped before the first is killed, so that few can fork meanwhile. Who forked all the
    same becomes our own child when its parent dies, and our own children can be listed faster than anybody forks.
    `groups` are the process groups to kill where descendants cannot be listed.
    """
    ended, left = reap()
    for group in groups:
        kill_group(group, signal.SIGKILL)
    deadline = clock.monotonic() + END_S
    list_again = 0.0
    while left and (now := clock.monotonic()) < deadline:
        if now >= list_again:
            family = descendants(os.getpid())
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in family:
                    kill(pid, number)
            list_again = now + 0.1
        for pid in children():
            kill(pid, signal.SIGKILL)
        more, left = reap()
        ended += more
        if left:
            clock.sleep(0.0005)
    return ended


def children() -> list[int]:
    """Return this process's own children, of all its threads; empty where the system does not list them."""
    pids: list[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                pids += map(int, file.read().split())
    except OSError:
        pass
    return pids


def kill(pid: int, number: int) -> None:
    """Send a signal to a process; one that is gone, or another user's, is left alone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def kill_group(group: int, number: int) -> None:
    """Send a signal to a process group; one that is gone is left alone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass

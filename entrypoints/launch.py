"""The launcher, the command of every node on every backend: `python source/.cloudtrain/launch.py`.

Two processes that watch each other. This one, the guard, does almost nothing; it forks the supervisor, which
prepares the node, starts the ranks and keeps the log (launcher/supervisor.py). Both are subreapers: when one is killed the
other becomes the parent of all that is left, ends it, and leaves a true status. When both are killed together a client
ends what is left by its control group; where none is to be had, the guard has a parent that does it.

    exit code   0 done; the first failed rank's own (a signal is 128+n); 75 left on request; 78 refused before training;
                69 lost
"""

import os
import signal
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PATH = os.path.join(HERE, "path")  # of what scripts import
sys.path[:] = [HERE, PATH, *(folder for folder in sys.path if folder not in (HERE, PATH))]

from launcher import cgroup, processes  # noqa: E402 - light: no more than the guard itself needs

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Fork the supervisor, wait for it, and leave with its exit code."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # a daemon's closed ones would be given to pipes
    if mask := os.environ.get("CLOUDTRAIN_UMASK"):
        os.umask(int(mask, 8))
    processes.seal_descriptors()
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    processes.restore_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    folder = os.environ.get("CLOUDTRAIN_NODE_DIR")
    adopts = processes.adopt_orphans() and os.getpid() != 1 and "SLURM_JOB_ID" not in os.environ
    if adopts and folder and not cgroup.enter(folder):
        outlive_guard(folder, nohup)
    guard = os.getpid()
    lifeline, held = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(held)
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the guard alone, which passes it on
        supervise(guard, lifeline)
    os.close(lifeline)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # what comes there is the supervisor's alone
    forward(supervisor, nohup)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == supervisor:
            break
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    processes.end_descendants()
    code = processes.exit_code(status)
    if os.WIFSIGNALED(status):
        from launcher import guard as last

        code = last.record_loss(folder, guard, os.WTERMSIG(status))
    if folder:
        cgroup.leave(folder)
    os._exit(code)


def forward(pid: int, nohup: bool) -> None:
    """Pass every request to stop on to a process, from now on."""
    for number in FORWARDED:
        signal.signal(number, lambda *_: processes.kill(pid, signal.SIGTERM))
    if nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def outlive_guard(folder: str, nohup: bool) -> None:
    """Return in a child, which is the guard; this process ends what is left when guard and supervisor have both ended."""
    parent = os.getpid()
    both, held = os.pipe()  # open in these two only: no program that they start inherits it
    guard = os.fork()
    if guard == 0:
        os.close(both)
        os.setpgid(0, 0)
        processes.die_with_parent(parent)
        return
    os.close(held)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    forward(guard, nohup)
    os.read(both, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    _, status = os.waitpid(guard, 0)
    processes.end_descendants()
    if os.WIFSIGNALED(status):
        from launcher import guard as last

        last.record_loss(folder, guard, os.WTERMSIG(status))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        processes.restore_signals()
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(processes.exit_code(status))


def supervise(guard: int, lifeline: int) -> None:
    """Be the supervisor; does not return."""
    code = 70
    try:
        from launcher.supervisor import main as run

        code = run(os.path.dirname(HERE), guard, lifeline)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            if os.getppid() != guard:
                cgroup.leave(os.environ.get("CLOUDTRAIN_NODE_DIR", ""))
            os._exit(code)


if __name__ == "__main__":
    main()

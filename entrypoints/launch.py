"""The launcher, the command of every node on every backend: `python source/.cloudtrain/launch.py`.

Two processes that watch each other. This one, the guard, does almost nothing; it forks the supervisor, which
prepares the node, starts the ranks and keeps the log (launcher/supervisor.py). Both are subreapers: when one is killed the
other becomes the parent of all that is left, ends it, and leaves a true status.

    exit code   0 done; the first failed rank's own (a signal is 128+n); 75 left on request; 78 refused before training;
                69 lost
"""

import os
import signal
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [HERE, *(folder for folder in sys.path if folder != HERE)]

from launcher import processes  # noqa: E402 - light: no more than the guard itself needs

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Fork the supervisor, wait for it, and leave with its exit code."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # a daemon's closed ones would be given to pipes
    processes.seal_descriptors()
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    processes.restore_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    processes.adopt_orphans()
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
    for number in FORWARDED:
        signal.signal(number, lambda *_: processes.kill(supervisor, signal.SIGTERM))
    if nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == supervisor:
            break
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    processes.end_descendants()
    code = processes.exit_code(status)
    if os.WIFSIGNALED(status):
        from launcher import guard as last

        code = last.record_loss(os.environ.get("CLOUDTRAIN_NODE_DIR"), guard, os.WTERMSIG(status))
    os._exit(code)


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
            os._exit(code)


if __name__ == "__main__":
    main()

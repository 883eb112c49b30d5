"""What each Python of a rank does at its start, as its `sitecustomize`: stacks on request, an end without gloo's abort,
and, where the job asks for it (checkpoint.engine), our checkpoints for each Trainer.

Where another `sitecustomize` is on the path, that one runs too, as if this one were not there.
"""

import atexit
import os
import sys

NUMBER = 7  # after SIGRTMIN
MARK = "cloudtrain-stacks-"  # cloudtrain/nodes/inside.py looks for it
GLOO = "pt_gloo_runloop"  # the name of gloo's threads in torch 2.4 and newer
CALM_ROUNDS, CALM_S, CALM_MAX_S = 3, 0.002, 5.0


def register() -> None:
    """Let `cloudtrain stack` read the stacks of this process's threads. Only on Linux, and never an error.

    faulthandler writes them to a file in memory when a real-time signal comes; the script sees neither. Lightning uses
    SIGUSR1, PyTorch's data loaders SIGCHLD, so that another signal is taken.
    """
    try:
        import _signal as signal  # type: ignore[import-not-found]  # of which `signal` makes enums: 2 ms of each rank
        import faulthandler
        import fcntl

        number = signal.SIGRTMIN + NUMBER
        if signal.getsignal(number) != signal.SIG_DFL:
            return  # it is somebody else's
        memory = os.memfd_create(f"{MARK}{number}")
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(number, file=memory, all_threads=True, chain=False)
    except (ImportError, AttributeError, OSError, ValueError, RuntimeError):
        pass  # another system, or an old one: `stack` says that this process has not registered


def wait_for_gloo() -> None:
    """Let gloo's threads finish with the last collective before Python ends; blocks for 5 s at most.

    Such a thread frees tensors of Python, for which it takes Python's lock. If Python has begun to end meanwhile, the
    process aborts ("terminate called without an active exception"), although the script succeeded. Known to PyTorch:
    https://github.com/pytorch/pytorch/issues/190489 (read 2026-11-25).
    """
    if "torch.distributed" not in sys.modules:
        return
    import time  # our packages are not on a script's path

    end, calm = time.monotonic() + CALM_MAX_S, 0  # noqa: TID251
    while calm < CALM_ROUNDS and time.monotonic() < end:  # noqa: TID251
        time.sleep(CALM_S)  # noqa: TID251 - a thread that waits for Python's lock gets it now
        states = gloo_states()
        if not states:
            return
        calm = 0 if "R" in states else calm + 1


def gloo_states() -> list[str]:
    """Return the state of each of gloo's threads in this process (`R`: it runs, or waits for a processor)."""
    states = []
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/stat", encoding="utf-8", errors="replace") as file:
                _, _, rest = file.read().partition(" (")
            name, _, fields = rest.rpartition(") ")
            if name == GLOO:
                states.append(fields[0])
    except OSError:
        pass  # another system, or a thread that has just ended
    return states


def run_next() -> None:
    """Run the `sitecustomize` that Python would have found without this one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != here])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    register()
    atexit.register(wait_for_gloo)  # the first that is registered is the last that runs
    if os.environ.get("CLOUDTRAIN_CHECKPOINT_ENGINE") == "cloudtrain":
        from cloudtrain_trainer import serve_all

        serve_all()
    run_next()

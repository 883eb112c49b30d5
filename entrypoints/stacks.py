"""Let `cloudtrain stack` read the stacks of a rank's threads. As `sitecustomize` it runs at the start of each Python.

faulthandler writes the stacks to a file in memory when a real-time signal comes; the script sees neither. Lightning uses
SIGUSR1, PyTorch's data loaders SIGCHLD, so that another signal is taken. Where another `sitecustomize` is on the path,
that one runs too, as if this one were not there.
"""

import os
import sys

NUMBER = 7  # after SIGRTMIN
MARK = "cloudtrain-stacks-"  # cloudtrain/nodes/inside.py looks for it


def register() -> None:
    """Write the stacks of all threads to a file in memory when the signal comes. Only on Linux, and never an error."""
    try:
        import faulthandler
        import fcntl
        import signal

        number = signal.SIGRTMIN + NUMBER
        if signal.getsignal(number) != signal.SIG_DFL:
            return  # it is somebody else's
        memory = os.memfd_create(f"{MARK}{number}")
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(number, file=memory, all_threads=True, chain=False)
    except (ImportError, AttributeError, OSError, ValueError, RuntimeError):
        pass  # another system, or an old one: `stack` says that this process has not registered


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
    run_next()

"""`python -m cloudtrain`, and what the command `cloudtrain` calls: the command line."""

import gc
import signal
import sys


def main() -> int:
    """Run the command of this process's own command line; the process ends here.

    While the command line itself is imported Ctrl-C ends the process as it ends any program: nothing is there yet that
    could say "interrupted", and a traceback says nothing of use.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(100_000)  # an import makes hundreds of thousands of objects that all stay
    from cloudtrain.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())

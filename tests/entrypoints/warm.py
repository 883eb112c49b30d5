"""A process that has imported what the trainer imports, and forks a rank on request: starting one costs no seconds.

Reads one JSON object a line: {"start": {argv, env, log, cwd}} is answered by {"pid"}, {"poll": pid} by {"code"}.

A rank ends without taking apart what this process has imported, which would copy all its memory: three seconds. What Python
does at an end before that, it does.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import runpy
import signal
import sys
import threading
from typing import NoReturn


def become(argv: list[str], env: dict[str, str], log: str, cwd: str) -> NoReturn:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, descriptor)
    faulthandler.register(signal.SIGUSR1, file=out)  # where it stands, when a test waits in vain
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    sys.path[:0] = [os.path.dirname(argv[0]), *env.get("PYTHONPATH", "").split(os.pathsep)]
    end(run(argv[0]))


def run(script: str) -> int:
    """Run a script and return the exit code that Python would end with."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def end(code: int) -> NoReturn:
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some libraries greet on standard output
    import accelerate
    import hypothesis
    import pandas
    import pyarrow.compute
    import pytest
    import torch.distributed.checkpoint
    import torch.distributed.checkpoint.state_dict
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.optimization import get_scheduler

    assert pandas and pyarrow, "which readers of tables import"
    assert pytest and hypothesis, "which scripts need that take helpers from a file of tests"
    assert (
        accelerate and torch and AutoModelForCausalLM and LlamaForCausalLM and PreTrainedTokenizerFast and get_scheduler
    )
    with contextlib.redirect_stdout(sys.stderr):  # it greets, and our answers go there
        import deepspeed  # where it is installed transformers imports it whenever it saves a model

        assert deepspeed
    gc.collect()
    gc.freeze()  # what is here is no garbage of a rank: looking through it would copy it, too
    for line in sys.stdin:
        [(verb, what)] = json.loads(line).items()
        if verb == "start":
            if "zero" in line:  # else each engine of DeepSpeed imports compilers for a second
                import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
            pid = os.fork()
            if pid == 0:
                become(**what)
            answer = {"pid": pid}
        else:
            done, status = os.waitpid(what, os.WNOHANG)
            answer = {"code": os.waitstatus_to_exitcode(status) if done else None}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

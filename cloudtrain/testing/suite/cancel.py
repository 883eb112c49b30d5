"""Cancel: not a success, at any moment, and nothing of the attempt is left."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from cloudtrain.backends.api import Backend
from cloudtrain.events import State
from cloudtrain.testing.fixtures import ContractFixtures
from cloudtrain.testing.suite.fetch import WRITER


class CancelContract(ContractFixtures):
    """What `cancel` promises."""

    def test_cancel_is_not_success_and_ends_everything(self, backend: Backend, start: Any) -> None:
        script = (
            "import os, signal, subprocess, sys, time\n"
            "def leave(*_):\n"
            "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"  # Slurm signals every process, and so does the launcher
            "    for n in range(100): print('leaving', n, flush=True)\n"
            "    sys.exit(0)\n"  # but the state must not be SUCCEEDED
            "signal.signal(signal.SIGTERM, leave)\n"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
            "print('ready', flush=True)\n"
            "time.sleep(600)\n"
        )
        handle = start(script, processes_per_node=2)
        self.until_line(backend, handle, "ready", times=2)
        backend.cancel(handle)
        backend.cancel(handle)
        assert self.until_final(backend, handle).state is State.CANCELLED
        self.assert_no_leftovers(handle)
        for rank in range(2):
            texts = [line.text for line in self.script_lines(backend, handle) if line.rank == rank]
            assert texts == ["ready", *(f"leaving {n}" for n in range(100))], self.text(backend, handle)

    def test_a_save_behind_a_shell_ends_before_the_attempt(self, backend: Backend, start: Any) -> None:
        saver = (
            "import signal, sys, time\n"
            "def leave(*_):\n"
            "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"  # Slurm signals every process, and so does the launcher
            "    time.sleep(2)\n"
            "    print('saved', flush=True)\n"
            "    sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, leave)\n"
            "print('ready', flush=True)\n"
            "time.sleep(600)\n"
        )
        text = f"PYTHON -c {shlex.quote(saver)}\necho never\n"
        handle = start(
            f"import os, sys\nos.execvp('bash', ['bash', '-c', {text!r}.replace('PYTHON', sys.executable)])\n"
        )
        self.until_line(backend, handle, "ready")
        backend.cancel(handle)
        assert self.until_final(backend, handle).state is State.CANCELLED
        texts = [line.text for line in self.script_lines(backend, handle)]
        assert texts == ["ready", "saved"], self.text(backend, handle)
        self.assert_no_leftovers(handle)

    def test_cancel_keeps_what_was_written(self, backend: Backend, start: Any, tmp_path: Path) -> None:
        wait = "import time\nprint('written', flush=True)\ntime.sleep(600)\n"
        handle = start(WRITER + wait, args=["1:one"])
        self.until_line(backend, handle, "written")
        backend.cancel(handle)
        assert self.until_final(backend, handle).state is State.CANCELLED
        into = backend.fetch(handle, tmp_path / "fetched")
        for folder in ("outputs", "checkpoints"):
            assert (into / folder / "kept" / "one").exists(), folder

    def test_cancel_rewrites_no_history(self, backend: Backend, start: Any) -> None:
        handle = start("print('done')")
        before = self.until_final(backend, handle)
        backend.cancel(handle)
        after = backend.status(handle)
        assert after == before, (before, after)
        assert before.state is State.SUCCEEDED

    def test_cancel_at_once(self, backend: Backend, start: Any) -> None:
        """While it is queued or starting: nobody has asked for its status yet."""
        handle = start("import time; time.sleep(600)")
        backend.cancel(handle)
        assert self.until_final(backend, handle).state is State.CANCELLED
        self.assert_no_leftovers(handle)

    def test_cancel_while_the_job_is_prepared(self, backend: Backend, start: Any) -> None:
        handle = start("print('never')", setup="echo preparing\nsleep 600\n")
        self.until_text(backend, handle, "preparing")
        backend.cancel(handle)
        assert self.until_final(backend, handle).state is State.CANCELLED
        assert self.script_lines(backend, handle) == []
        self.assert_no_leftovers(handle)

"""How a command's process ends: with everything said, its exit handlers run, and without a word at Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import WAIT_S

SCRIPT = """
import atexit, pathlib, sys, threading, time
sys.argv = ["cloudtrain", *{words!r}]
atexit.register(lambda: pathlib.Path("handler").write_text("ran"))
{more}
from cloudtrain.cli import main
sys.exit(main())
"""


def run(folder: Path, *words: str, more: str = "") -> subprocess.CompletedProcess[str]:
    text = SCRIPT.format(words=list(words), more=more)
    return subprocess.run(
        [sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.mark.parametrize(("words", "code", "said"), [(["--version"], 0, "cloudtrain "), (["nonsense"], 2, "nonsense")])
def test_a_command_ends_its_process_with_its_code_and_its_words(tmp_path, words, code, said):
    done = run(tmp_path, *words)
    assert done.returncode == code, done.stderr
    assert said in (done.stderr if code else done.stdout)
    assert (tmp_path / "handler").read_text() == "ran"


def test_a_long_output_arrives_whole_through_a_slow_pipe(tmp_path):
    text = SCRIPT.format(words=["init", "--schema"], more="")
    child = subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, stdout=subprocess.PIPE)
    slow = subprocess.run(["sh", "-c", "sleep 0.5; cat"], stdin=child.stdout, capture_output=True, timeout=WAIT_S)
    assert child.wait(WAIT_S) == 0
    assert slow.stdout.rstrip().endswith(b"}")
    assert len(slow.stdout) > 10_000


def test_threads_are_waited_for(tmp_path):
    more = (
        "def late():\n    time.sleep(0.3)\n    pathlib.Path('late').write_text('done')\n"
        "threading.Thread(target=late).start()\n"
    )
    assert run(tmp_path, "--version", more=more).returncode == 0
    assert (tmp_path / "late").read_text() == "done"


def test_output_that_cannot_be_written_is_told(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cloudtrain", "--version"],
            cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=WAIT_S,
        )  # fmt: skip
    assert done.returncode == 2
    assert "no space left" in done.stderr


def test_ctrl_c_when_the_command_is_done_changes_nothing(tmp_path):
    done = run(tmp_path, "--version", more="import signal\natexit.register(lambda: signal.raise_signal(signal.SIGINT))")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "handler").read_text() == "ran"


EARLY = """
import os, signal, sys
class Moment:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Moment())
sys.argv = ["cloudtrain", "--version"]
from cloudtrain.__main__ import main
main()
"""


def test_ctrl_c_while_the_command_line_is_imported_ends_silently(tmp_path):
    done = subprocess.run([sys.executable, "-c", EARLY], cwd=tmp_path, capture_output=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_in_nobodys_way(tmp_path, closed):
    """A command goes on, and no file of its own gets a closed stream's number, into which others would write."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "job.yaml").write_text("name: closed\nentrypoint: train.py\n")
    env = {**os.environ, "CLOUDTRAIN_HOME": str(tmp_path / "home")}
    for words in ("plan job.yaml", "ls", "ls --json", "--help", "submit job.yaml --follow", "logs", "show"):
        command = f"exec {sys.executable} -m cloudtrain {words} {closed}"
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        assert b"internal error" not in done.stderr, words
        if ">&-" not in closed.split() and words == "submit job.yaml --follow":
            assert b"hello" in done.stdout
    assert Path(tmp_path / "home" / "history.sqlite3").read_bytes()[:15] == b"SQLite format 3"

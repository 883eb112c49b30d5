"""`run` and `setup` texts end at the first command that fails; what keeps its own way; what other tools do."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from launcher import shell

from tests.entrypoints.launching import Attempt


class Said:
    """Stands in for a log."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


# text, compat; exit code, output, and what names the failure
TABLE = [
    ("sh -c 'exit 3' | tee /dev/null\n", "", 3, "", "line 1 failed with exit code 3: sh -c 'exit 3' | tee /dev/null"),
    ("echo a\nno-such-program x\necho b\n", "", 127, "a\n", "line 2 failed with exit code 127: no-such-program x"),
    ("f() {\n  false\n}\nf\necho b\n", "", 1, "", "line 2 failed with exit code 1:   false"),
    ("x=$(false)\necho b", "", 1, "", "line 1 failed with exit code 1: x=$(false)"),
    ("yes | head -n1\necho b", "", 141, "y\n", "line 1 failed with exit code 141: yes | head -n1"),
    ("echo a\nsh -c 'exit 4'\n", "", 4, "a\n", ""),  # the last one speaks for itself
    ("sh -c 'exit 5'", "", 5, "", ""),
    ("false || true\nif false; then :; fi\n[ -f /no-such ] && echo y\necho b", "", 0, "b\n", ""),
    ("echo a\nsh -c 'exit 4' |\n  cat\n", "", 4, "a\n", "line 3 failed with exit code 4:   cat"),
    ("echo a\nsh -c 'exit 4' || sh -c 'exit 5'", "", 5, "a\n", ""),
    ("echo a\necho b\n. ./sourced.sh\n", "", 1, "a\nb\n", "line 3 of ./sourced.sh failed with exit code 1: grep -q x /dev/null"),
    (". ./sourced.sh", "", 1, "", "line 3 of ./sourced.sh failed with exit code 1: grep -q x /dev/null"),
    (". ./sourced.sh || true\necho b\n", "", 0, "b\n", ""),
    ("exit 7\n", "", 7, "", ""),
    ("set +e\nfalse | true\necho b", "", 0, "b\n", ""),
    ("set +e\nfalse | true", "", 0, "", ""),  # without pipefail too
    ("\n# why\nset +e; false\necho b", "", 0, "b\n", ""),
    ("echo a\nset +e\nfalse\necho b", "", 0, "a\nb\n", ""),
    ("#!/bin/bash\nfalse\necho b", "", 0, "b\n", ""),
    ("false\necho b", "skypilot", 0, "b\n", ""),
    ("false | true\nfalse\necho b", "dstack", 1, "", "line 2 failed with exit code 1: false"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "compat", "code", "output", "failure"), TABLE)
def test_a_text_ends_at_the_first_failure(text, compat, code, output, failure, tmp_path):
    (tmp_path / "sourced.sh").write_text("# settings\nexport A=1\ngrep -q x /dev/null\ntrue\n")
    done = subprocess.run(shell.command(text, "run", compat, Said()), capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, output)
    assert (f"run: {failure}\n" in done.stderr and "set +e" in done.stderr) if failure else "run: " not in done.stderr


def test_without_bash_the_text_runs_with_sh(monkeypatch, tmp_path):
    (tmp_path / "sh").symlink_to(shutil.which("sh"))
    monkeypatch.setenv("PATH", str(tmp_path))
    said = Said()
    argv = shell.command("false\necho b", "setup", "", said)
    assert subprocess.run(argv, capture_output=True).returncode == 1 and len(said.lines) == 1
    assert "bash is not installed" in said.lines[0] and "setup" in said.lines[0]
    assert subprocess.run(shell.command("set +e\nfalse\necho b", "run", "", said), capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("text", "code", "output"),
    [
        ("#!/bin/bash\nfalse\necho b\nexit 3\n", 3, "b\n"),
        ("#!/bin/bash -e\nfalse\necho b\n", 1, ""),
        (f"#!/usr/bin/env {sys.executable}\nprint('b')\n", 0, "b\n"),
    ],
)
def test_a_body_of_sbatch_has_the_interpreter_of_its_first_line(text, code, output, monkeypatch, tmp_path):
    monkeypatch.setenv("CLOUDTRAIN_NODE_DIR", str(tmp_path))
    done = subprocess.run(shell.command(text, "run", "sbatch", Said()), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, output)
    setup = shell.command("false\necho b", "setup", "sbatch", Said())
    assert subprocess.run(setup, capture_output=True).returncode == 1, "setup keeps our own way"


def test_the_attempt_fails_with_it(tmp_path):
    text = "sh -c 'echo trains; exit 3' | tee log\n"
    with Attempt(tmp_path / "run", argv=(text,), form="shell") as attempt:
        assert attempt.run() == [3]
        assert attempt.texts(0)[:2] == ["trains", f"run: line 1 failed with exit code 3: {text.strip()}"]
    with Attempt(tmp_path / "setup", "print('never')", setup="no-such-program\ntrue\n") as attempt:
        assert attempt.run() == [78]
        assert "setup exited with code 127" in attempt.status()["reason"] and not attempt.texts(0)
        assert "setup: line 1 failed with exit code 127: no-such-program" in attempt.texts(-1)


def test_an_image_without_bash(tmp_path):
    """The launcher's Python and sh are all that is on the path."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sh").symlink_to(shutil.which("sh"))
    environ = {"PATH": str(tmp_path / "bin")}
    with Attempt(tmp_path / "run", argv=("echo a\nfalse\necho b\n",), form="shell", environ=environ) as attempt:
        assert attempt.run() == [1]
        assert attempt.texts(0) == ["a"] and any("bash is not installed" in text for text in attempt.texts(-1))

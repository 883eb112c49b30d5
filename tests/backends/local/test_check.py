"""What `doctor` finds of this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudtrain.backends.local.backend import LocalBackend


@pytest.mark.parametrize(("free", "named"), [((1 << 30) - 1, True), (1 << 30, False)])
def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, named: bool):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    problems = LocalBackend({}, tmp_path / "runs").check()
    assert [(problem.message, problem.hint) for problem in problems] == [
        (f"less than 1 GiB is free below {tmp_path}", "set CLOUDTRAIN_HOME")
    ] * named


def test_a_folder_that_cannot_be_written_and_an_interpreter_that_is_not_there(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or mode != os.W_OK)
    problems = LocalBackend({"python": "/no/python"}, tmp_path / "runs").check()
    assert [(problem.message, problem.path or problem.hint) for problem in problems] == [
        ("the interpreter /no/python does not exist", "options.local.python"),
        (f"{tmp_path} cannot be written", "set CLOUDTRAIN_HOME"),
    ]

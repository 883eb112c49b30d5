from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain.nodes import supervisor
from cloudtrain.nodes.process import Process, boot_id, start_time
from tests.conftest import wait_for


def test_this_process_lives():
    me = Process.here()
    assert me.alive is True
    assert Process.parse(str(me)) == me


def test_a_dead_process_is_dead_also_as_a_zombie():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = replace(Process.here(), pid=child.pid, started=start_time(child.pid))
    assert process.alive is True
    child.kill()
    wait_for(lambda: process.alive is False, "death")  # not waited for: it is a zombie now
    child.wait()
    assert process.alive is False


def test_the_same_number_is_not_the_same_process():
    assert replace(Process.here(), started="1").alive is False
    assert replace(Process.here(), boot_id="another boot").alive is False


def test_nobody_knows_of_another_machine():
    assert replace(Process.here(), host="elsewhere").alive is None


def test_junk_is_no_process():
    assert Process.parse("") is None
    assert Process.parse("a|b|c|d") is None


def test_start_time_of_an_odd_name(tmp_path):
    script = tmp_path / "a ) (b"
    script.write_text("#!/bin/sh\nread line\n")
    script.chmod(0o755)
    child = subprocess.Popen([str(script)], stdin=subprocess.PIPE)
    try:
        assert wait_for(lambda: start_time(child.pid)).isdigit()
    finally:
        child.kill()
        child.wait()
    assert boot_id() or not os.path.exists("/proc")


def test_a_control_group_that_is_busy_for_a_moment_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is until the kernel has done with the processes that were killed in it."""
    group = tmp_path / "group"
    (group / "below" / "busy").mkdir(parents=True)
    (tmp_path / "cgroup").write_text(str(group))
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            for file in group.rglob("held"):
                file.unlink()

    (group / "below" / "busy" / "held").touch()
    monkeypatch.setattr(supervisor.time, "sleep", sleep)
    assert supervisor.kill_leftovers(tmp_path) == 0
    assert not group.exists() and len(waits) == 3

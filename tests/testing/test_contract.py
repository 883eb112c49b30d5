"""The contract suite itself: nine faults, seeded into the local backend one at a time, are all caught by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# name -> the faulty class's body, and the tests that must fail (others may fail too)
FAULTS = {
    "stopped is success": (
        "def status(self, handle):\n"
        "    status = super().status(handle)\n"
        "    return replace(status, state=State.SUCCEEDED) if status.state is State.CANCELLED else status\n",
        "test_cancel_is_not_success_and_ends_everything",
    ),
    "jobs in memory": (
        "def __init__(self, *a):\n    super().__init__(*a); self.mine = set()\n"
        "def submit(self, plan, bundle):\n    handle = super().submit(plan, bundle); self.mine.add(handle); return handle\n"
        "def status(self, handle):\n"
        "    return super().status(handle) if handle in self.mine else Status(State.LOST, reason='unknown')\n",
        "test_handle_survives_a_new_backend_object",
    ),
    "lost exit code": (
        "def status(self, handle):\n"
        "    status = super().status(handle)\n"
        "    return replace(status, exit_code=1) if status.exit_code else status\n",
        "test_exit_code_is_the_scripts",
    ),
    "unquoted argv": (
        "def plan(self, job, *a):\n"
        "    words = ' '.join(job.args).split()\n"
        "    return super().plan(job.model_copy(update={'args': words}), *a)\n",
        "test_arguments_arrive_as_written",
    ),
    "endless follow": (
        "def logs(self, handle, *, follow=False, after=None):\n"
        "    yield from super().logs(handle, follow=follow, after=after)\n"
        "    while follow: time.sleep(0.1)\n",
        "test_following_sees_lines_as_they_come_and_ends",
    ),
    "dropped last line": (
        "def logs(self, handle, *, follow=False, after=None):\n"
        "    held = None\n"
        "    for line in super().logs(handle, follow=follow, after=after):\n"
        "        if held: yield held\n"
        "        held = line\n",
        "test_every_line_once_and_in_order",
    ),
    "cancel rewrites history": (
        "def cancel(self, handle):\n    super().cancel(handle); (Path(handle) / 'cancelled').touch()\n"
        "def status(self, handle):\n"
        "    status = super().status(handle)\n"
        "    return replace(status, state=State.CANCELLED) if (Path(handle) / 'cancelled').exists() else status\n",
        "test_cancel_rewrites_no_history",
    ),
    "clock in the plan": (
        "def plan(self, *a):\n    return replace(super().plan(*a), notes=(datetime.now().isoformat(timespec='seconds'),))\n",
        "test_plan_is_pure",
    ),
    "one status for all": (
        "group, calls_per_s = 'here', 1.0\n"
        "def statuses(self, handles):\n    return {handle: self.status(handles[0]) for handle in handles}\n",
        "test_statuses_are_those_of_status_in_fewer_calls",
    ),
}
SUITE = """
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
import pytest
from cloudtrain.backends import registry
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.events import State, Status
from cloudtrain.testing.contract import BackendContract

class Faulty(LocalBackend):
{body}

registry.BUILT_IN["local"] = ("faulty_contract:Faulty", None)

class TestFaulty(BackendContract):
    @pytest.fixture
    def connect(self, tmp_path):
        return lambda: Faulty({{}}, tmp_path / "work")
"""


def run_suite(folder: Path, body: str, *, only: str = "", wait_s: str = "20") -> subprocess.CompletedProcess[str]:
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    (folder / "faulty_contract.py").write_text(SUITE.format(body=indented))
    suite = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir",
        str(folder),
    ]
    suite += ["--basetemp", str(folder / "t"), str(folder / "faulty_contract.py"), *(["-k", only] if only else [])]
    env = {**os.environ, "CLOUDTRAIN_CONTRACT_WAIT_S": wait_s, "PYTHONPATH": str(folder)}
    return subprocess.run(suite, cwd=folder, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_caught(tmp_path, fault):
    body, test = FAULTS[fault]
    ended = run_suite(tmp_path, body, only=test, wait_s="8" if fault == "endless follow" else "20")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"::{test}" in ended.stdout.rpartition("short test summary")[2]


def test_without_a_fault_those_tests_pass(tmp_path):
    names = " or ".join(test for _, test in FAULTS.values())
    ended = run_suite(tmp_path, "pass", only=names)
    assert ended.returncode == 0, ended.stdout + ended.stderr

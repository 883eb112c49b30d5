"""Which tests run when: a test is of its tier or fails with a sentence; a change runs the long tests of what it touches."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import cloudtrain.testing.suite
from tests.conftest import WATCH, run_bounded, wait_for
from tests.extent import TIERS, is_later, tier_of, tier_of_name
from tests.sample import FIXED, LAB, TABLE, changed_files, long_tests


def start_a_process() -> None:
    subprocess.run([sys.executable, "-c", ""])


def start_a_process_and_catch_what_comes() -> None:
    try:
        start_a_process()
    except BaseException:
        pass


def sleep() -> None:
    time.sleep(0.5)


def connect() -> None:
    with socket.socket() as end:
        end.connect(("192.0.2.1", 9))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (start_a_process, "starts a process"),
        (start_a_process_and_catch_what_comes, "starts a process"),
        (sleep, "sleeps 0.5 s"),
        (connect, "connects to 192.0.2.1"),
    ],
)
def test_a_decision_that_does_more_fails(act, said, request):
    with pytest.raises(pytest.fail.Exception, match=f"{said}.*needs tier 1: name it in tests/tiers.txt"):
        with WATCH.over(request.node):
            act()


def test_git_short_polls_and_servers_of_this_process_are_no_more(request):
    with socket.create_server(("127.0.0.1", 0)) as server, WATCH.over(request.node):
        subprocess.run(["git", "--version"], check=True, stdout=subprocess.DEVNULL)
        time.sleep(0.001)
        socket.create_connection(server.getsockname()).close()


def test_a_thread_that_an_earlier_test_left_is_not_the_tests_doing(request):
    go = threading.Event()
    died: list[BaseException] = []

    def late() -> None:
        go.wait()
        try:
            start_a_process()
        except BaseException as error:
            died.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    with WATCH.over(request.node):
        go.set()
        thread.join()
    assert died == []


def test_a_command_that_hangs_fails_with_the_stacks_of_all_processes_of_its_home(tmp_path, monkeypatch):
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path))
    beside = "def simulated(): time.sleep(600)\nimport time; print('up', flush=True); simulated()"
    begun, communicate = tmp_path / "begun", subprocess.Popen.communicate
    command = f"def asked():\n    open({str(begun)!r}, 'w').close()\n    time.sleep(600)\nimport time; asked()"

    def bounded(child: subprocess.Popen, timeout: float | None = None) -> tuple[str, str]:
        if timeout is None:
            return communicate(child)
        wait_for(begun.exists, "the command")
        raise subprocess.TimeoutExpired(child.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", bounded)  # the bound is over as soon as the command hangs
    with open(tmp_path / "simulator.log", "w") as log:
        words = [sys.executable, "-X", "faulthandler", "-c", beside]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log) as other:
            other.stdout.readline()
            with pytest.raises(pytest.fail.Exception, match=r"(?s)in asked.*simulator\.log.*in simulated"):
                run_bounded([sys.executable, "-Sc", command], tmp_path)


def test_the_most_specific_name_counts(monkeypatch):
    from tests import extent

    monkeypatch.setattr(extent, "TIERS", {"a": 3, "a/b": 2, "a/b/test_c.py": 1, "a/b/test_c.py::test_d[x]": 2})
    names = (
        "a/test_e.py::test",
        "a/b/test_e.py::T::test",
        "a/b/test_c.py::test_d",
        "a/b/test_c.py::test_d[x]",
        "z.py::t",
    )
    assert [tier_of_name(name) for name in names] == [3, 2, 1, 2, 0]
    assert is_later("a/b/test_c.py", 0) and not is_later("a/b/test_c.py", 1) and not is_later("z.py", 0)


def test_the_tables_name_tests_that_are_there():
    missing = []
    suite = "".join(file.read_text() for file in Path(cloudtrain.testing.suite.__path__[0]).glob("*.py"))
    for name in {*TIERS, *FIXED, *(name for names in TABLE.values() for name in names)}:
        path, *inside = name.partition("[")[0].split("::")
        file = Path(__file__).parent / path
        text = suite if path == "suite" else file.read_text() if file.is_file() else "" if file.exists() else None
        there = text is not None and all(f" {part}(" in text for part in inside[:1])  # a class inherits tests
        missing += [] if there else [name]
    assert missing == []


def git(root: Path, *words: str, date: str = "2020-01-01T00:00:00Z") -> None:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    env = {**who, "GIT_COMMITTER_DATE": date, "PATH": "/usr/bin:/bin:/usr/local/bin"}
    subprocess.run(["git", "-C", root, *words], check=True, env=env, stdout=subprocess.DEVNULL)


def test_a_change_is_compared_with_what_has_landed_else_with_a_day_ago_else_with_nothing(tmp_path):
    assert changed_files(tmp_path) is None
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "old").write_text("")
    git(tmp_path, "add", ".")
    now = f"@{int(time.time())} +0000"
    git(tmp_path, "commit", "-qm", "first", date=now)
    assert changed_files(tmp_path) is None, "a clone without history runs everything"
    git(tmp_path, "commit", "-qm", "first", "--amend")
    assert changed_files(tmp_path) is None, "nor has a commit of long ago anything to be compared with"
    (tmp_path / "today").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "second", date=now)
    (tmp_path / "not tracked").write_text("")
    assert changed_files(tmp_path) == ["today", "not tracked"]
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    assert changed_files(tmp_path) == ["today", "not tracked"], "a clone of what has landed"
    (tmp_path / "mine").write_text("")
    git(tmp_path, "add", "mine")
    git(tmp_path, "commit", "-qm", "third", date=now)
    assert changed_files(tmp_path) == ["mine", "not tracked"]


def test_a_change_runs_the_long_tests_of_what_it_touches():
    assert long_tests(["cloudtrain/metrics/use.py", "docs/index.md"]) == ([], [])
    slurm, _ = long_tests(["cloudtrain/backends/slurm/script.py"])
    assert "backends/slurm/test_backend.py" in slurm and "backends/ssh/test_backend.py" not in slurm
    assert set(LAB) <= set(long_tests(["entrypoints/launcher/ranks.py"]).chosen)
    assert "backends/slurm/test_login.py" in long_tests(["tests/backends/slurm/test_login.py"]).chosen


def test_a_change_of_many_packages_or_of_unknown_ones_runs_the_fixed_sample():
    many = long_tests([f"{path}x" for path in TABLE])
    assert many == long_tests(None) and set(many.chosen) == set(FIXED)
    assert set(LAB) <= set(many.left_out)


def test_of_the_contract_suite_a_target_of_tier_2_runs_what_the_table_names(monkeypatch):
    from tests import extent

    monkeypatch.setattr(extent, "TIERS", {"a.py": 2, "b.py": 1, "suite::test_find": 2, "suite::test_exit[3]": 2})
    suite = SimpleNamespace(__module__="cloudtrain.testing.suite.submit")

    def tier(file: str, name: str, obj: object) -> int:
        kept = {"name": name, "originalname": name.partition("[")[0], "get_closest_marker": lambda _: None}
        return tier_of(SimpleNamespace(nodeid=f"tests/{file}::T::{name}", obj=obj, **kept))

    names = ("test_find", "test_exit[0]", "test_exit[3]", "test_else")
    assert [tier("a.py", name, suite) for name in names] == [2, 3, 2, 3]
    assert [tier("b.py", name, suite) for name in names] == [1, 1, 1, 1]
    assert tier("a.py", "test_else", tier) == 2, "it is the target's own test"


@pytest.mark.parametrize(("mark", "tier"), [("timeout", 0), ("slow", 2), ("docker", 2), ("long", 3)])
def test_a_mark_makes_the_tier_later(mark, tier):
    node = SimpleNamespace(nodeid="tests/a.py::t", get_closest_marker=lambda name: name == mark)
    assert tier_of(node) == tier
    node.fixturenames = ["home", "lab"]
    assert tier_of(node) == 3

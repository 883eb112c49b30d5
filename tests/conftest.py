"""What all tests share: a home of their own, and a census of processes afterwards."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from botocore.loaders import JSONFileLoader

from tests.decisions import Watch
from tests.extent import is_later, names_of, tier_of
from tests.sample import sample

pytest_plugins = ["tests.lab.fixtures"]

TESTS = Path(__file__).parent
TORCH_AT_EXIT = str(TESTS / "torch_at_exit")  # a folder for PYTHONPATH: see its sitecustomize.py
LAST = {"0": 0, "1": 1, "2": 2, "ci": 2, "3": 3}  # the last tier of an option --tier that is run as a whole
WAIT_S = 120.0  # a bound for any single wait; machines are slow and busy

# Who starts us in the background of a script may ignore Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread a process: tests share few cores, and sums must not depend on how many there are.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each client of AWS parses the description of its service, a quarter of a test's time: once for each process is enough.
described = cache(partial(JSONFileLoader.load_file, JSONFileLoader()))
JSONFileLoader.load_file = lambda _, path: described(path)

WATCH = Watch()

gc.disable()  # until all tests are collected: what that makes stays, and looking through it is a third of the time


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--tier 1`: the tests of tiers 0 and 1, see tests/tiers.txt; `sample`: those of tests/sample.py; `ci`: these and tier 2."""
    parser.addoption(
        "--tier", choices=("0", "1", "2", "3", "sample", "ci"), help="run tests up to this tier, none in containers"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file whose tests are all of later tiers, or not in the sample."""
    tier = config.getoption("tier")
    if tier is None or collection_path.suffix != ".py" or TESTS not in collection_path.parents:
        return None
    path = collection_path.relative_to(TESTS).as_posix()
    if tier in ("sample", "ci") and any(name.partition("::")[0] == path for name in sample().chosen):
        return None
    return True if is_later(path, LAST.get(tier, -1)) else None


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what the sample leaves out."""
    if config.getoption("tier") not in ("sample", "ci"):
        return []
    chosen, left_out = sample()
    return [f"sample: {len(chosen)} names", *(f"left out, make test-long has it: {name}" for name in left_out)]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Leave out the tests of later tiers; of several workers, each begins with its part of the tests of the latest one.

    xdist gives each worker as many tests, in this order. One that has ended its own takes some from the end of another's
    list: quick ones, so that no worker is left with long tests while the others have none.
    """
    if wanted := config.getoption("tier"):
        chosen = chosen_tests(wanted, items)
        left_out = [item for item in items if item not in chosen]
        items[:] = [item for item in items if item in chosen]
        config.hook.pytest_deselected(items=left_out)
    if wanted in ("0", "1", "2", "ci"):
        settle_choices()
    settle_draws(items, {"0": 0.3, "1": 0.3, "3": 10.0}.get(wanted, 1.0))
    yield
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count > 1:
        tiers = [[item for item in items if tier_of(item) == tier] for tier in (3, 2, 1, 0)]
        items[:] = [
            item
            for part in range(count)
            for tier in tiers
            for item in tier[part * len(tier) // count : (part + 1) * len(tier) // count]
        ]


def settle_draws(items: list[pytest.Item], factor: float) -> None:
    """Let hypothesis draw the same in every run, or by CLOUDTRAIN_SEED, and measure no time.

    It draws fewer or more examples than a test names, but for the long draws of tier 3.
    """
    from hypothesis import HealthCheck, seed

    functions = {getattr(item.obj, "__func__", item.obj): tier_of(item) for item in items}
    for function, tier in functions.items():
        if given := getattr(function, "_hypothesis_internal_use_settings", None):
            count = max(int(given.max_examples * factor), 10) if tier < 3 else given.max_examples
            checks = {*given.suppress_health_check, HealthCheck.too_slow}
            function._hypothesis_internal_use_settings = type(given)(
                given, max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=checks
            )
            if drawn := os.environ.get("CLOUDTRAIN_SEED"):
                seed(int(drawn))(function)


def settle_choices() -> None:
    """Let hypothesis draw the same whichever modules this process has loaded: it takes numbers and words from their source.

    Each worker of a fresh clone would parse that source, and try each character in UTF-8: ten seconds.
    """
    from hypothesis.internal import charmap
    from hypothesis.internal.conjecture import providers
    from hypothesis.internal.intervalsets import IntervalSet

    utf_8 = IntervalSet([(0, 0xD7FF), (0xE000, sys.maxunicode)]), IntervalSet([])  # all but surrogates; all come back
    found = charmap.intervals_from_codec
    charmap.intervals_from_codec = lambda codec: utf_8 if codec == "utf-8" else found(codec)
    providers._get_local_constants = lambda: providers._local_constants


def chosen_tests(wanted: str, items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that an option --tier asks for."""
    here = [item for item in items if not item.get_closest_marker("docker")]
    chosen = {item for item in here if tier_of(item) <= LAST.get(wanted, -1)}
    if wanted in ("sample", "ci"):
        names = set(sample().chosen)
        here = [item for item in here if tier_of(item) == 3]
        chosen |= {item for item in here if names.intersection(names_of(item.nodeid.removeprefix("tests/")))}
    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Hold a test of tier 0 to what it may do, its fixtures too."""
    return (yield from _held(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Hold a test of tier 0 to what it may do."""
    return (yield from _held(item))


def _held(item: pytest.Item) -> Iterator[None]:
    with WATCH.over(item) if tier_of(item) == 0 else nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> Iterator[None]:
    """Remember which fixtures of several tests start a process."""
    with WATCH.fixture(fixturedef):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """What has been imported and collected stays: no test looks through it for what is left."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def chance(request: pytest.FixtureRequest) -> None:
    """A test draws the same in every run, whatever ran before it in this process."""
    seed = crc32(request.node.nodeid.encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history of its own for every test: none may touch the user's."""
    folder = tmp_path / "home"
    monkeypatch.setenv("CLOUDTRAIN_HOME", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("CLOUDTRAIN_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def held() -> Iterator[socket.socket]:
    """Return a bound socket that does not listen.

    A connection to its port is refused, a server that names the port and sets SO_REUSEADDR may listen on it, and the kernel
    gives it to nobody who asks for any free one. A port that was free a moment ago may be another test's by now.
    """
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("", 0))
        yield one


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]):
    """Run a command in this process; return exit code, output and standard error."""
    from cloudtrain.cli import main

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def census(home: Path) -> Iterator[Path]:
    """After the test no process that belongs to its home may be left (they get a while to end)."""
    yield home
    deadline = time.monotonic() + WAIT_S
    while left := processes_of(home):
        assert time.monotonic() < deadline, f"left behind: {left}"
        dismiss_watcher(home)
        time.sleep(0.1)


def dismiss_watcher(home: Path) -> None:
    """Spare a test the seconds for which a watcher without live runs waits for the next one; one with live runs stays."""
    from cloudtrain.clock import SYSTEM
    from cloudtrain.errors import CloudtrainError
    from cloudtrain.history.store import Store
    from cloudtrain.runs.sending import handover

    if (home / "history.sqlite3").exists():
        with suppress(CloudtrainError):  # a test may have spoiled the history
            store = Store(home)
            holder = store.watcher()
            if holder and holder.is_valid(SYSTEM) and all(run.status.state.final for run in store.runs(limit=10_000)):
                handover.call(holder.address, {"do": "stop"})


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Return a function that notes with what figure a test has proven its law (docs/promises.py writes them down)."""

    def note(what: str, value: object) -> None:
        if path := os.environ.get("CLOUDTRAIN_FIGURES"):
            with open(path, "a") as file:  # one write of one line: several workers share the file
                file.write(json.dumps({"test": request.node.nodeid, "what": what, "value": value}) + "\n")

    return note


def processes_of(folder: Path) -> list[str]:
    """Return the processes whose environment or command line names a folder, this one excepted."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
        except OSError:
            continue
        watcher = "cloudtrain.runs.watching.watch_all\0"
        marks = (f"CLOUDTRAIN_NODE_DIR={folder}", f"CLOUDTRAIN_RUN_DIR={folder}", watcher)
        mine = str(folder).encode() in words and any(mark.encode() in words for mark in marks)
        if mine and state not in (b"Z", b"X"):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            found.append(f"{entry.name}: {command[:200]}")
    return found


def run_bounded(
    command: list[str], home: Path, bound_s: float = 2 * WAIT_S, **options
) -> subprocess.CompletedProcess[str]:
    """Run a command; where it hangs, fail with the stacks of it and of every other process of its home."""
    env = {**options.pop("env", os.environ), "PYTHONFAULTHANDLER": "1"}  # SIGABRT prints the stacks of all threads
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **pipes, **options) as child:
        try:
            out, err = child.communicate(timeout=bound_s)
        except subprocess.TimeoutExpired:
            for pid in [child.pid, *_pids_of(home)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            out, err = child.communicate()
            wait_for(lambda: not list(_pids_of(home)), "the end of what printed its stacks")
            logs = [f"--- {path}\n{path.read_text(errors='replace')[-20_000:]}" for path in home.rglob("*.log")]
            pytest.fail("\n".join([f"{command} hangs", out, err, *logs]))
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def _pids_of(home: Path) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"CLOUDTRAIN_HOME={home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def require(program: str) -> None:
    """Skip the test where a program is missing; fail in CI, which names what it must have in CLOUDTRAIN_REQUIRE."""
    if shutil.which(program) is None:
        if program in os.environ.get("CLOUDTRAIN_REQUIRE", "").split(","):
            pytest.fail(f"{program} is required here and is not installed")
        pytest.skip(f"{program} is not installed")


@contextmanager
def served(server: Any) -> Iterator[Any]:
    """Serve in a thread, which ends before its socket is closed: with a closed one it would spin until the process ends."""
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def wait_for(condition, what: str = "it", bound_s: float = WAIT_S):
    """Poll until a condition holds and return its value."""
    deadline = time.monotonic() + bound_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {bound_s} s"
        time.sleep(0.02)
    return value

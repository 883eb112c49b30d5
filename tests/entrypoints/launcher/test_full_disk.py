"""A disk that is full during a run: the end and its result arrive, and the log says how many lines it lacks."""

from __future__ import annotations

import errno
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from launcher import sink as sink_module
from launcher.log import KeptLog
from launcher.sink import Sink

from tests import disks
from tests.conftest import wait_for
from tests.entrypoints.launching import Attempt

GAP = re.compile(r"log incomplete: disk full, ([\d,]+) lines? lost")
FULL = "disks full until the end of a run, its result and state are known"
# Fills a disk but for some kilobytes, prints 60,000 lines and leaves the disk full.
SCRIPT = """
import os, sys, errno
with open(os.environ["FILL"], "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
for n in range(60000):
    print(f"line {n} of sixty thousand lines that are logged while the disk is full")
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a small disk, which holds the launcher with its bytecode and all lines of a log."""
    with disks.small_disk(tmp_path / "disk", "12m") as folder:
        yield folder


def check_log(attempt: Attempt) -> int:
    """Check that the log says of every line that it has it or lacks it, in order; returns how many it lacks."""
    lines = attempt.lines()
    numbers = [seq for seq, *_ in lines]
    assert numbers == sorted(set(numbers))
    gaps = [int(match[1].replace(",", "")) for line in lines if (match := GAP.fullmatch(line[3]))]
    printed = [text for text in attempt.texts(0) if text.startswith("line ")]
    assert all(text.endswith(" while the disk is full") for text in printed), "a line is torn"
    assert len(printed) + sum(gaps) == 60000
    (result,) = attempt.events("result")
    assert [event["state"] for event in attempt.events("state")][-1] == result["state"] == attempt.status()["state"]
    assert result.get("incomplete", "") == (f"log incomplete: disk full, {sum(gaps)} lines lost" if gaps else "")
    return sum(gaps)


def test_a_full_disk_below_the_node(disk, tmp_path, figure):
    with Attempt(disk, SCRIPT, environ={"FILL": str(disk / "fill")}) as attempt:
        assert attempt.run() == [0]
        lost = check_log(attempt)
        assert 0 < lost < 60000 and attempt.status()["state"] == "SUCCEEDED"
        assert attempt.texts(0)[-1].startswith("line 59999 "), "the newest lines are the ones that say why"
    figure(FULL, 1)


def test_a_disk_that_has_space_again_loses_nothing(disk):
    script = SCRIPT + 'os.unlink(os.environ["FILL"])\nprint("line 60000 while the disk is full")\n'
    with Attempt(disk, script.replace("60000", "59999"), environ={"FILL": str(disk / "fill")}) as attempt:
        attempt.run()
        assert check_log(attempt) == 0


@pytest.mark.parametrize("folder", ["checkpoints", "tmp"])
def test_a_full_disk_elsewhere_costs_no_line(folder, disk, tmp_path, figure):
    """The folder of checkpoints, or /tmp."""
    run = disk if folder == "checkpoints" else tmp_path / "run"
    environ = {"FILL": str(disk / "fill"), "CLOUDTRAIN_RUN_DIR": str(run), "TMPDIR": str(disk)}
    with Attempt(tmp_path / "nodes", SCRIPT + "sys.exit(3)", environ=environ) as attempt:
        assert attempt.run() == [3]
        assert check_log(attempt) == 0 and attempt.status()["state"] == "FAILED"
    figure(FULL, 1)


def test_a_supervisor_that_is_killed_on_a_full_disk_leaves_its_end(disk, tmp_path):
    full = tmp_path / "full"  # on another disk: from then on nothing fills up what the supervisor's end frees
    script = SCRIPT.replace("60000", "10") + f"open({str(full)!r}, 'w').close()\nimport time\ntime.sleep(600)"
    with Attempt(disk, script, environ={"FILL": str(disk / "fill")}) as attempt:
        attempt.start()
        wait_for(full.exists, "a full disk")
        os.kill(attempt.supervisor(), signal.SIGKILL)
        assert attempt.wait() == [69]
        assert attempt.status()["state"] == "LOST"
        (result,) = attempt.events("result")
        assert result["state"] == "LOST" and "killed by signal 9" in result["reason"]


def test_the_copy_of_a_clouds_log_says_what_it_lacks(disk, monkeypatch):
    """Without a node's folder the log is standard output, and what goes to the output is its copy in /tmp."""
    monkeypatch.setenv("TMPDIR", str(disk))
    monkeypatch.setattr(tempfile, "tempdir", None)
    log = KeptLog(os.open(os.devnull, os.O_WRONLY))
    with (disk / "fill").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    for n in range(300):
        log.lines(0, [b"x" * 1000] * 100)
    log.say("the end")
    assert log.settle() == 0, "standard output has all of it"
    log.close()
    text = os.pread(log.copy[0], 1 << 20, 0).decode()
    (gap,) = GAP.findall(text)
    assert int(gap) + text.count("x" * 1000) == 30000 and text.endswith(" the end\n")


def chunks(sink: Sink, texts: list[tuple[str, bool]]) -> None:
    seq = 0
    for text, own in texts:
        lines = text.splitlines()
        sink.put(
            seq, "t", "".join(f"{seq + n} {-1 if own else 0} t {line}\n" for n, line in enumerate(lines)).encode(), own
        )
        seq += len(lines)


def test_a_log_that_memory_does_not_hold_keeps_its_newest_lines_and_the_launchers(tmp_path, monkeypatch):
    monkeypatch.setattr(sink_module, "MAX_WAITING", 4000)
    real, full = os.write, True

    def write(descriptor: int, data: bytes) -> int:
        if not full:
            return real(descriptor, data)
        if written.pop():
            return real(descriptor, data[:-5])  # a line is torn
        raise OSError(errno.ENOSPC, "No space left on device")

    written = [False] * 10000 + [True]
    monkeypatch.setattr(os, "write", write)
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sink = Sink(descriptor)
    lines = [("first\nsecond", False), ("a state", True)]
    lines += [(f"line {n}\nmore {n}", False) for n in range(500)] + [("the end", True)]
    chunks(sink, lines)
    full = False
    sink.close()
    monkeypatch.undo()
    texts = (tmp_path / "log").read_text().splitlines()
    assert texts[:3] == ["0 0 t first", "1 0 t second", "2 -1 t a state"] and texts[-1] == "1003 -1 t the end"
    (gap,) = (text for text in texts if "log incomplete" in text)
    kept = [text for text in texts[texts.index(gap) + 1 :] if " 0 t " in text]
    assert gap == f"3 -1 t log incomplete: disk full, {1000 - len(kept)} lines lost" and sink.lost == 1000 - len(kept)
    assert 0 < len(kept) < 500 and kept == [
        f"{n} 0 t {'line' if n % 2 else 'more'} {(n - 3) // 2}" for n in range(1003 - len(kept), 1003)
    ]

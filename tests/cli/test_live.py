"""The live view below a followed log: what it says, what it spares the eye, and that a pipe never sees it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from cloudtrain import events
from cloudtrain.backends.api import Plan
from cloudtrain.cli.view.columns import display_width
from cloudtrain.cli.view.live import LOG_HEIGHT, MIN_HEIGHT, LiveView, Panel, format_usage
from cloudtrain.cli.view.terminal import clean
from cloudtrain.events import Event, Row, State, Status
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.run import Run
from tests.cli.conftest import CLI
from tests.conftest import WAIT_S, wait_for

# Progress as tqdm writes it, with carriage returns, events behind the bar, and ordinary lines in between.
SCRIPT = """\
import sys, time
for n in range(41):
    sys.stderr.write(f"\\r{n * 100 // 40:3d}%|####| {n}/40 [00:{n:02d}<00:10, 9.9it/s]")
    sys.stderr.flush()
    print('::cloudtrain::{"kind": "metric", "step": %d, "loss": %f}' % (n, 2 - n / 40), flush=True)
    if n % 20 == 0:
        print("plain line", n, "\\x1b[2J", flush=True)
    time.sleep(0.05)
"""


def on_a_terminal(*words, columns=70, term="xterm", **settings) -> str:
    """Return everything that a command writes to a terminal."""
    main, worker = pty.openpty()
    fcntl.ioctl(worker, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    told = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    env = {**told, "TERM": term, "PYTHONUTF8": "1"}
    process = subprocess.Popen([*CLI, *words], stdout=worker, stderr=worker, env=env, **settings)
    os.close(worker)
    written = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        written += piece
    os.close(main)
    process.wait(timeout=WAIT_S)
    assert process.returncode == 0, written
    return written.decode()


def lasting(written: str) -> list[str]:
    """Return the lines that are left on the screen: what stands behind an erasure up to the next cursor movement up."""
    left = ""
    for piece in written.split("\r\x1b[J"):
        *_, kept = ("", piece) if "A\r" not in piece else ("", piece[: piece.find("-----")])
        left += kept
    return [clean(line) for line in left.replace("\r\n", "\n").split("\n")]


def test_a_followed_run_on_a_terminal_and_in_a_pipe(project, shell, census):
    (project / "bar.py").write_text(SCRIPT)
    written = on_a_terminal("submit", "bar.py", "-f")
    lines = lasting(written)
    assert [line for line in lines if line.startswith("plain line")] == [f"plain line {n} " for n in (0, 20, 40)]
    assert not [line for line in lines if "it/s" in line and "100%|" not in line], "the bar does not flood the log"
    assert "\x1b[2J" not in written, "a terminal obeys nothing in a log"
    assert "RUNNING" in written and "loss" in written
    assert any(line.startswith("bar-") and "SUCCEEDED after" in line for line in lines[-5:])
    # every event was heard, although each stood behind a bar
    assert [row["step"] for row in shell("metrics", "--json").rows] == list(range(41))

    piped = shell("logs", "-f")
    assert "\x1b[A" not in piped.out and "-----" not in piped.out and piped.out.count("it/s") == 41


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_silent_wait_keeps_to_one_line_of_a_narrow_terminal(project, census, term):
    (project / "short.py").write_text("print('done')\n")
    written = on_a_terminal("submit", "short.py", "--wait", columns=20, term=term)
    assert "SUCCEEDED" in written.partition("submitted")[2]
    if term == "dumb":
        assert "\x1b" not in written and "\rshort-" not in written
    else:
        _, *ticks = written.split("\r\x1b[K")
        assert any(tick.startswith("short-") for tick in ticks), "it was seen to live"
        assert all(len(tick) <= 19 for tick in ticks[:-1]), ticks


@pytest.fixture
def store(home) -> Store:
    store = Store(home)
    plan = Plan(
        "local", "tiny-1", 1, {}, {"sha256": "0"}, {"secrets": {}, "nodes": 10, "processes_per_node": 1},
        {"name": "tiny", "hyperparameters": {"max_steps": "400"}}, "local",
    )  # fmt: skip
    assert store.intend(plan, identity="i", owner=Process.here())
    store.record("tiny-1-a1", status=Status(State.RUNNING, started_at="2026-11-21T10:00:00Z"))
    return store


def record(store, seq, step, node=0, **values):
    event = Event("tiny-1-a1", node, seq, "2026-11-21T10:00:01Z", "metric")
    store.record(
        "tiny-1-a1", metrics=[Row(event.node, event.seq, event.at, step, name, value) for name, value in values.items()]
    )


def test_the_panel_says_what_the_history_knows(store, monkeypatch):
    panel = Panel("tiny-1", store)
    first = panel.lines(100, 20)
    assert len(first) == 2 and "RUNNING" in first[1] and "step" not in first[1]
    for n in range(50):
        record(store, n, n * 2, loss=5 - n / 10, tokens_per_s=12345.6, mfu=0.4127)
    gpus = [{"index": 0, "percent": 87.0, "memory_bytes": 40 << 30, "memory_total_bytes": 80 << 30}]
    usage = {"cpu_percent": 250.4, "rss_bytes": 12_300_000_000, "gpus": gpus}
    store.record("tiny-1-a1", events=[Event("tiny-1-a1", node, 1000, "t", "usage", usage) for node in range(10)])
    store.record("tiny-1-a1", events=[Event("tiny-1-a1", 0, 1001, "t", "usage", {"cpu_percent": 10, "rss_bytes": 1})])
    lines = panel.lines(100, 20)
    assert "step 98/400 (24%)" in lines[1] and "ETA" not in lines[1]  # nothing to estimate from yet
    assert lines[2].startswith("loss 0.1 ") and lines[2].endswith("12,346 tokens/s   MFU 41%")
    assert lines[3] == "node 0  cpu 10%  memory 1 B"
    assert lines[4] == "node 1  cpu 250%  memory 12 GB  gpu0 87% 43/86 GB"
    assert lines[-1] == "... and 2 more nodes" and len(lines) == 3 + 8 + 1
    panel.bar = "a bar"
    low = panel.lines(100, MIN_HEIGHT - LOG_HEIGHT)
    assert (
        len(low) == MIN_HEIGHT - LOG_HEIGHT
        and low[3].startswith("node 0  cpu")
        and low[4:] == ["... and 9 more nodes", "a bar"]
    )
    for height in range(1, 20):
        assert len(panel.lines(100, height)) <= height
    panel.bar = ""
    record(store, 60, 198, loss=0.05)
    panel.read_total_steps(["anything", "step 198/200  loss 3"])
    assert "step 198/200 (99%)" in panel.lines(100, 20)[1] and "ETA" in panel.lines(100, 20)[1]
    panel.bar = "x" * 300
    assert all(len(line) < 40 for line in map(clean, panel.lines(40, 20)))


def test_use_of_a_node_that_says_little():
    assert format_usage(events.read_usage({})) == ""
    assert format_usage(events.read_usage({"cpu_percent": 3, "gpus": [{"percent": 7}]})) == "cpu 3%  gpu0 7%"


def test_the_panel_stands_what_ranks_print(store):
    for n in range(40):
        record(store, n, n, loss=1.7e308 * (-1) ** n, tokens_per_s=1.7e308, mfu=float("nan"))
    odd = [{"cpu_percent": 10**400}, {"gpus": [{"percent": "x"}]}, {"gpus": [5], "rss_bytes": 2e9}, {"gpus": 5}]
    events = [Event("tiny-1-a1", node, 1000, "t", "usage", data) for node, data in enumerate(odd)]
    store.record("tiny-1-a1", events=events)
    panel = Panel("tiny-1", store)
    lines = panel.lines(100, 20)
    assert [line for line in lines if line.startswith("node")] == ["node 2  memory 2 GB"]
    assert any(line.startswith("loss -1.7e308  ") for line in lines)
    panel.read_total_steps(["step 1/" + "9" * 5000])
    assert "step 39/400" in panel.lines(100, 20)[1]


def test_the_panel_is_cut_where_the_terminal_ends(store):
    panel = Panel("tiny-1", store)
    panel.bar = "学習\t" * 20
    assert panel.lines(40, 20)[-1] == "学習 " * 7 + "学習"  # 39 columns: a wide character takes two
    panel.bar = "é" * 50 + "e\u0301" * 50  # a combining accent takes none
    assert display_width(panel.lines(81, 20)[-1]) == 80 and panel.lines(81, 20)[-1].endswith("\u0301")


def test_the_log_goes_on_without_a_panel(store, monkeypatch, capsys):
    """A history that has lost the run takes the panel, and no line of the log."""
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    with LiveView(Run("lost-1", store, watch=False)) as live:
        for line in ("one", "two"):
            live.add(line)
            wait_for(lambda line=line: line in out.getvalue(), f"the line {line!r}")
        assert capsys.readouterr().err == ""
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("the status view below the log stopped, the run continues: ") and "IndexError" in told

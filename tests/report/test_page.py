"""The report: one file that holds everything, and in which nothing that a job names or prints is more than text."""

from __future__ import annotations

import builtins
import json
import re
import sys
import threading
import types
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.console.nodeuse import _use
from cloudtrain.diagnosis.verdict import Verdict
from cloudtrain.errors import BadRequest
from cloudtrain.events import Event, LogLine, Row, State, Status
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.report import comparison, page, plots, use
from cloudtrain.runs import listing
from cloudtrain.runs.live_card import live_card
from cloudtrain.runs.run import Run


def render(run: Run) -> str:
    return page.render(run.store, run.run_id, run.verdict(), run.logs(raw=True))


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp; \x1b[31m\x07"


class Page(HTMLParser):
    """Notes the tags of a page, its scripts and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script" and self.lasttag == "script":
            self.scripts.append(data)
        else:
            self.text += data


@pytest.fixture
def run(home, monkeypatch) -> Run:
    """A finished run in which every text that a job can choose is hostile."""
    store = Store(home)
    plan = Plan(
        "local", "tiny-1", 1, {"env": HOSTILE}, {"sha256": "0", "files": 1},
        {"secrets": {}, "nodes": 2, "processes_per_node": 1, "argv": ["train.py", HOSTILE]},
        {"name": "tiny", "source": HOSTILE, "hyperparameters": {"lr": "1e-3", HOSTILE: HOSTILE}, "labels": {"a": HOSTILE}},
        HOSTILE,
    )  # fmt: skip
    origin = {"commit": "c" * 40, "dirty": True, "text": f"diff --git a/x b/x\n+{HOSTILE}\n", "left_out": [HOSTILE],
              "client": {"host": HOSTILE, "system": "Linux", "python": "3", "cloudtrain": "0"}}  # fmt: skip
    assert store.intend(plan, identity="i", owner=Process.here(), provenance=origin)
    points = [(Event("tiny-1-a1", 0, n, "2026-11-21T10:00:00Z", "metric"), n) for n in range(3000)]
    rows = [
        Row(event.node, event.seq, event.at, step, name, 5 - step / 1000)
        for event, step in points
        for name in ("loss", HOSTILE)
    ]
    usage = [
        Event("tiny-1-a1", node, 9000 + n, f"2026-11-21T10:00:{n:02d}Z", "usage",
              {"cpu_percent": 100.0 + n, "rss_bytes": 1 << 30, "gpus": [{"index": 0, "percent": 50, "memory_bytes": 1 << 30}]})
        for node in range(2) for n in range(3)
    ]  # fmt: skip
    usage.append(Event("tiny-1-a1", 0, 9998, "t", "requirements", {"part": 0, "packages": ["torch==2.0", HOSTILE, 1]}))
    many = [f"package-{n}==1" for n in range(12)]
    usage.append(Event("tiny-1-a1", 0, 9997, "t", "requirements", {"part": 1, "packages": many}))
    store.record(
        "tiny-1-a1", metrics=rows, events=[*usage, Event("tiny-1-a1", 0, 9999, "t", "alarm", {"reason": HOSTILE})]
    )
    ended = Status(State.FAILED, 3, HOSTILE, "2026-11-21T10:00:00Z", "2026-11-21T11:00:00Z")
    store.record("tiny-1-a1", status=ended)
    store.set_status("tiny-1", ended)
    lines = [LogLine("2026-11-21T10:00:00Z", n % 2, 0, n, f"{HOSTILE} {n}", str(n)) for n in range(5000)]
    monkeypatch.setattr(Run, "logs", lambda self, **_: iter(lines))  # a backend's log, as hostile as it can be
    return Run("tiny-1", store, watch=False)


def test_the_page_holds_everything_and_hostile_text_is_text(run, tmp_path):
    text = render(run)
    page = Page(text)
    assert "alert(1)" in page.text and "<img src=x" in page.text, "it is shown, as text"
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "link", "object", "base", "form")]
    assert not [
        attrs for _, attrs in page.tags if any(name.startswith("on") or name in ("src", "href") for name in attrs)
    ]
    drawn = [script for script in page.scripts if script.startswith("Plotly.newPlot(")]
    assert len(drawn) == 2 and len([tag for tag, _ in page.tags if tag == "script"]) == 3
    for script in drawn:
        data = json.loads("[" + script.partition("(")[2].rpartition(")")[0] + "]")
        assert data[0] in ("curves", "use") and "<" not in script
        assert not re.search(r"<(script|img)", json.dumps(data)), "plotly takes tags in its texts"
    assert "\x1b" not in text and "\x07" not in text
    for words in (
        "FAILED",
        "Provenance",
        "c" * 40,
        "node 1, the last 2,000 of 2,500 lines",
        "request to the platform, as sent",
        " 4999",
    ):
        assert words in page.text, words
    assert f"{HOSTILE[:40]}" in page.text
    assert "packages (1)torch==2.0" in page.text
    assert "packages=12 entries" in page.text and "package-7==1" not in page.text, "the timeline has no long lists"
    assert "2 nodes x 1 process" in page.text and "1 processes" not in page.text


def test_the_page_asks_nobody_for_anything(run):
    text = render(run)
    page = Page(text)
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "http" not in policy and "connect-src" not in policy
    (plotly,) = [script for script in page.scripts if len(script) > 1_000_000]
    assert "newPlot" in plotly


def test_points_that_are_not_finite_are_marked(run):
    values = enumerate((3.0, 2.0, float("nan")))
    rows = [Row(0, 9000 + n, "t", n, "bad", value, 0) for n, value in values]
    run.store.record(run.attempts[0].attempt_id, metrics=rows)
    figures = [plots.curves(run.store, [run.run_id], [name]) for name in ("bad", "loss")]
    (marked,), none = ([trace for trace in each.data if "not finite" in (trace.name or "")] for each in figures)
    assert (list(marked.x), list(marked.y), none) == ([2], [2.0], [])


def test_without_plotly_there_is_one_sentence(run, monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "plotly":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadRequest, match="plotly, which is not installed") as error:
        page.write(run.store, run.run_id, tmp_path / "x.html", verdict=None, log=())
    assert error.value.hint == "pip install 'cloudtrain[console]'"
    assert list(tmp_path.glob("*.html")) == [] and list(tmp_path.glob(".*")) == []


def test_figures_of_curves(run):
    figure = run.plot("loss")
    assert len(figure.data) == 3, "a curve and the band that it lies in"
    assert max(figure.data[2].y) <= 5 and len(figure.data[2].x) <= 1001
    with pytest.raises(BadRequest, match="there is no metric los\n") as error:
        run.plot("los")
    assert "loss" in error.value.hint
    both = plots.curves(run.store, [run.run_id, run.run_id], ["loss"])
    assert [trace.showlegend for trace in both.data if trace.mode == "lines" and trace.showlegend] == [True, True]


def resumed_run(home) -> Run:
    """A run of two ranks whose second attempt resumed at step 4 of 8; epochs are known of one metric."""
    store = Store(home)
    for attempt, first in ((1, 0), (2, 4)):
        plan = Plan("local", "again-1", attempt, {}, {"sha256": "0"}, {"secrets": {}}, {"name": "again"}, "local")
        if attempt == 1:
            assert store.intend(plan, identity="again", owner=Process.here())
        else:
            store.record("again-1-a1", status=Status(State.PREEMPTED, 75))
            assert store.next_attempt(plan, owner=Process.here())
        events = [(n, Event(f"again-1-a{attempt}", 0, n, "2026-11-21T10:00:00Z", "metric")) for n in range(first, 8)]
        for rank in (0, 1):
            rows = [
                Row(event.node, event.seq, event.at, n, "loss", 9.0 - n + attempt, rank, n / 2) for n, event in events
            ]
            store.record(
                f"again-1-a{attempt}",
                metrics=[row._replace(seq=row.seq + 100 * (rank + 1)) for row in rows],
            )
    return Run("again-1", store, watch=False)


def test_what_was_done_again_is_faint_in_figures_report_and_notebook(home):
    run = resumed_run(home)
    lost, kept = run.plot("loss").data
    assert (list(lost.x), lost.opacity, lost.showlegend) == ([3, 4, 5, 6, 7], plots.LOST_OPACITY, False)
    assert (list(kept.x), kept.opacity) == (list(range(8)), None)
    assert kept.text[3] == "epoch 1.5" and "%{text}" in kept.hovertemplate
    text = page.render(run.store, run.run_id, None, [])
    assert f'"opacity": {plots.LOST_OPACITY}' in text
    faint, strong = re.findall(r'points="([^"]*)"[^>]* opacity="([^"]*)"', run._repr_html_())
    assert (len(faint[0].split()), faint[1]) == (5, "0.3") and (len(strong[0].split()), strong[1]) == (8, "1")


def test_figures_have_a_curve_for_each_rank_and_epochs_as_an_axis(home):
    run = resumed_run(home)
    both = run.plot(rank=None)
    assert [trace.name for trace in both.data if trace.opacity is None] == ["rank 0", "rank 1"]
    assert [trace.showlegend for trace in both.data if trace.opacity is None] == [True, True]
    over = run.plot("loss", over="epoch", rank=1)
    assert list(over.data[-1].x) == [n / 2 for n in range(8)] and over.layout.xaxis.title.text == "epoch"
    assert page.render(run.store, run.run_id, None, [], rank=None).count('"name": "rank 1"') == 1
    run.store.record("again-1-a2", metrics=[Row(0, 900, "t", 3, "lr", 0.1)])
    assert len(run.plot("lr", over="epoch").data) == 0, "its epochs are not known"


def test_a_run_without_metrics_says_so_in_its_page(home):
    run = resumed_run(home)
    told = ["no metrics were found in the log. The log lines most:", f"line 3: {HOSTILE}"]
    text = page.render(run.store, run.run_id, None, [], rank=9, no_metrics=told)
    shown = Page(text)
    assert told[0] in shown.text and "alert(1)" in shown.text
    assert [tag for tag, _ in shown.tags if tag in ("img", "script")] == []


def test_the_last_lines_of_a_failure_stand_on_the_page_unfolded(run):
    """A browser prints no folded part."""
    at = "2026-11-21T10:00:00Z"
    lines = [LogLine(at, node, 0, n, f"node {node} line {n} {HOSTILE}", "") for node in (0, 1) for n in range(99)]
    verdict = Verdict("script-error", "a script failed", "line 98", "log", node=1, seq=98)
    text = page.render(run.store, run.run_id, verdict, lines)
    last = re.search('<h2>Last lines of node 1</h2><pre class="last">(.*?)</pre>', text, re.DOTALL)
    assert last is not None and len(last[1].splitlines()) == page.LAST_LINES
    assert "node 1 line 98" in last[1] and "node 0" not in last[1] and "<img" not in last[1]
    assert text.index("Last lines") < text.index("<h2>Curves") and "<details" not in text[: text.index("<h2>Curves")]
    assert "Last lines" not in page.render(run.store, run.run_id, None, lines)
    assert "Last lines" not in page.render(run.store, run.run_id, verdict, [])


def test_use_that_does_not_fit_is_left_out(run):
    odd = [
        {"cpu_percent": "abc", "rss_bytes": {"a": 1}, "gpus": 5},
        {"gpus": [{"percent": "x"}, 7]},
        {"cpu_percent": 1e400},
    ]
    later = [Event("tiny-1-a1", 2, n, "t", "usage", data) for n, data in enumerate(odd)]
    run.store.record(
        "tiny-1-a1", events=[*later, Event("tiny-1-a1", 1, 9500, "t", "usage", {"rss_bytes": 3e9, **odd[1]})]
    )
    figure = use.use(run.store, run.run_id)
    assert {trace.name for trace in figure.data} == {"node 0", "node 1", "node 0, GPU 0", "node 1, GPU 0"}
    seen = {(trace.name, trace.xaxis): list(trace.y) for trace in figure.data}
    assert seen["node 1", "x"] == [100.0, 101.0, 102.0, None]
    assert seen["node 1", "x2"] == pytest.approx([1.073741824] * 3 + [3.0])
    assert seen["node 1, GPU 0", "x3"] == [50.0] * 3
    assert "node 1, GPU 0" in render(run)


def test_use_of_which_nothing_fits_is_none(run, home):
    plan = run.attempts[-1].plan
    assert run.store.intend(replace(plan, run_id="odd-1"), identity="j", owner=Process.here())
    run.store.record("odd-1-a1", events=[Event("odd-1-a1", 0, 1, "t", "usage", {"gpus": 5})])
    odd = Run("odd-1", run.store, watch=False)
    assert use.use(odd.store, odd.run_id) is None and "nothing was reported" in render(odd)
    assert _use(odd, -1) == (1, {})


def test_a_name_with_quotes_is_shown_with_quotes(run):
    """plotly knows entities for tags and none for a quote: it would show its letters."""
    name = """a "b" <i>'c' & d"""
    event = Event("tiny-1-a1", 0, 20_000, "2026-11-21T10:00:00Z", "metric")
    run.store.record("tiny-1-a1", metrics=[Row(event.node, event.seq, event.at, 1, name, 1.0)])
    (title,) = run.plot(name).layout.annotations
    assert title.text == """a "b" &lt;i&gt;'c' &amp; d"""


def test_a_card_stands_numbers_of_any_size(run):
    values = [1.7e308, -1.7e308, float("nan"), 5e-324]
    rows = [Row(0, 20_000 + n, "t", n, "huge", value) for n, value in enumerate(values)]
    run.store.record("tiny-1-a1", metrics=rows)
    card = run._repr_html_()
    assert "huge" in card and 'points="0.0,1.0 53.3,31.0 160.0,16.0"' in card


class Kernel:
    """What a card needs of IPython: a shell with a kernel, and displays that can be updated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel, self.shown = object(), []
        shell = types.ModuleType("IPython")
        shell.get_ipython = lambda: self
        shell.display = types.ModuleType("IPython.display")
        shell.display.HTML, shell.display.display = str, self.display
        monkeypatch.setitem(sys.modules, "IPython", shell)
        monkeypatch.setitem(sys.modules, "IPython.display", shell.display)

    def display(self, html: str, *, display_id: bool) -> Kernel:
        assert display_id
        self.update(html)
        return self

    def update(self, html: str) -> None:
        self.shown.append(html)


def test_the_card_of_a_notebook_is_drawn_again_at_the_end(run, monkeypatch):
    with pytest.raises(NotImplementedError):  # a terminal's IPython prints it
        run._ipython_display_()
    kernel = Kernel(monkeypatch)
    lines = [
        LogLine("t", 0, 0, n, text, f"1/{n}") for n, text in enumerate(["first", "::cloudtrain::x", "<b>last</b>"])
    ]
    monkeypatch.setattr(Run, "logs", lambda self, **_: iter(lines))
    card = live_card(run)
    card.join()
    assert "<th>last line</th>" not in kernel.shown[0] and "FAILED" in kernel.shown[0]
    assert "<td> &lt;b&gt;last&lt;/b&gt;</td>" in kernel.shown[-1] and "to cancel" not in kernel.shown[-1]
    in_thread = []
    thread = threading.Thread(target=lambda: in_thread.append(live_card(run)))
    thread.start()
    thread.join()
    assert in_thread == [None], "what waits in a thread draws nothing into the cell of another"


def test_a_run_and_runs_in_a_notebook(run, home):
    card = run._repr_html_()
    assert "FAILED" in card and "<svg" in card and "2 at step 2999" in card.replace("2.001", "2")
    assert "<script" not in card and "<img" not in card
    found = listing.runs()
    assert [one.run_id for one in found] == ["tiny-1"] and len(listing.runs(state="lost")) == 0
    assert "tiny-1" in found._repr_html_() and repr(found) == "<Runs tiny-1>" and len(found[0:1]) == 1
    chosen = listing.runs("is:starred", sort="-metric.loss", columns="hp.lr,metric.loss.min,cost,eta")
    assert len(chosen) == 0 and "<th>metric.loss.min</th>" in chosen._repr_html_()
    shown = listing.runs(columns=["hp.lr", "metric.loss.min", "system.cpu.max", "eta"])
    assert "<th>system.cpu.max</th><th>eta</th>" in shown[:1]._repr_html_() and "<td>1e-3</td>" in shown._repr_html_()
    grouped = shown.to_pandas().groupby("hp.lr")["metric.loss.min"].agg(["mean", "min", "max"])
    assert grouped.loc["1e-3"].tolist() == [shown.to_pandas()["metric.loss.min"][0]] * 3
    with pytest.raises(BadRequest, match="no column"):
        listing.runs(columns="hp.lr,nothing")
    frame = found.to_pandas()
    row = frame.iloc[0]
    assert (row["run_id"], row["state"], row["exit_code"], row["hp.lr"]) == ("tiny-1", "FAILED", 3, "1e-3")
    event = Event("tiny-1-a1", 0, 20_000, "2026-11-21T10:00:00Z", "metric")
    run.store.record(
        "tiny-1-a1",
        metrics=[
            Row(event.node, event.seq, event.at, 1, "state", 7.0),
            Row(event.node, event.seq, event.at, 1, "hp.lr", 8.0),
        ],
    )
    again = listing.runs().to_pandas().iloc[0]
    assert (again["state"], again["metrics.state"]) == ("FAILED", 7.0)
    assert (again["hp.lr"], again["metrics.hp.lr"]) == ("1e-3", 8.0)
    assert row["loss"] == pytest.approx(2.001) and str(frame["started_at"].dtype).startswith("datetime64")


def test_the_points_of_a_run_are_a_table_and_a_list_of_rows(run):
    points = run.metrics("loss")
    frame = points.to_pandas()
    assert list(frame["value"]) == [row.value for row in points] and len(points) > 20
    assert frame["at"].dtype.kind == "M" and frame.iloc[-1]["step"] == points[-1].step == 2999
    shown = points._repr_html_()
    assert f"<td>{len(points) - 20} more</td>" in shown and shown.count("<tr>") == 22
    assert run.metrics("nothing") == [] and list(run.metrics("nothing").to_pandas()["value"]) == []


def test_a_comparison_is_one_file_in_which_hostile_names_are_text(run, tmp_path):
    store = run.store
    job = {"name": "tiny", "source": HOSTILE, "hyperparameters": {"lr": "5e-4", HOSTILE: f"{HOSTILE} too"}}
    plan = Plan("local", "tiny-2", 1, {"env": "x"}, {"sha256": "0"}, {"secrets": {}, "nodes": 1}, job, "here")
    assert store.intend(plan, identity="j", owner=Process.here())
    events = [Event("tiny-2-a1", 0, n, "2026-11-21T10:00:00Z", "metric") for n in range(3)]
    store.record(
        "tiny-2-a1", metrics=[Row(event.node, event.seq, event.at, event.seq, HOSTILE, 1.0) for event in events]
    )
    run.mark(title=HOSTILE)
    path = comparison.write(store, ["tiny-1", "tiny-2"], tmp_path / "c.html", smoothing=0.5, log=True)
    text = path.read_text()
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "link", "object", "base", "form")]
    assert not [
        attrs for _, attrs in page.tags if any(name.startswith("on") or name in ("src", "href") for name in attrs)
    ]
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    (drawn,) = [script for script in page.scripts if script.startswith("Plotly.newPlot(")]
    data = json.loads("[" + drawn.partition("(")[2].rpartition(")")[0] + "]")
    assert "<" not in drawn and not re.search(r"<(script|img)", json.dumps(data)), "plotly takes tags in its texts"
    names = {trace["name"] for trace in data[1] if trace.get("showlegend")}
    assert len(names) == 2 and any("alert(1)" in name for name in names)
    assert "\x1b" not in text and "\x07" not in text
    for words in ("2 runs compared", "Hyperparameters", "5e-4", "1e-3", "tiny-2", "Results"):
        assert words in page.text, words
    assert list(tmp_path.glob(".*.tmp")) == []
    with pytest.raises(BadRequest, match="two to 200 runs"):
        comparison.render(store, ["tiny-1", "tiny-1"])

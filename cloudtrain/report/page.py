"""A run as one self-contained page of HTML: it opens from disk and works offline.

What a job has named or printed is text in it and nothing else: escaped, without control characters. A policy in the
page's head forbids the browser to fetch anything.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import images
from cloudtrain.events import PLATFORM, show_marks, without_event
from cloudtrain.report import plots, use
from cloudtrain.report.packages import requirements

if TYPE_CHECKING:
    from cloudtrain.diagnosis.verdict import Verdict
    from cloudtrain.events import LogLine
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

LINES = 2000  # of each node's log, the last ones
LIST_ITEMS = 8  # of an event, in the timeline
LAST_LINES = 30  # of the node that failed, shown above all else
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
# Its own buttons only: plotly's others offer to send the figure to a server.
_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]]}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d232b; margin: 2rem auto; max-width: 1100px; padding: 0 1rem }
h1 { font-size: 1.4rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem; border-bottom: 1px solid #d8dde3 }
.state { font-weight: 600; padding: .1rem .5rem; border-radius: .3rem; color: #fff; background: #6b7785 }
.SUCCEEDED { background: #2e7d32 } .FAILED, .LOST, .TIMED_OUT { background: #b3261e } .RUNNING, .STARTING { background: #00639b }
.CANCELLED, .PREEMPTED, .STOPPING { background: #9a6700 }
.wide { overflow-x: auto } .wide :is(td, th) { overflow-wrap: break-word }
table { border-collapse: collapse } td, th { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top }
th { font-weight: 500; color: #55606c; white-space: nowrap } td { overflow-wrap: anywhere; white-space: pre-line }
pre { background: #f5f7f9; padding: .8rem; overflow: auto; max-height: 36rem; font-size: 12.5px; line-height: 1.35 }
@media print {
  body { margin: 0; max-width: none } pre { max-height: none; overflow: visible; white-space: pre-wrap }
  pre { overflow-wrap: anywhere } h2 { break-after: avoid } .js-plotly-plot { break-inside: avoid }
  .state { color: #000; background: none; border: 1px solid #000 }
}
details { margin: .6rem 0 } summary { cursor: pointer; font-weight: 500 } .dim { color: #6b7785 }
"""


def render(
    store: Store,
    run_id: str,
    verdict: Verdict | None,
    log: Iterable[LogLine],
    *,
    rank: int | None = 0,
    no_metrics: Sequence[str] = (),
    costs: Sequence[str] = (),
) -> str:
    """Return a run's page; `log` are the lines of all attempts and nodes. Raises BadRequest without plotly.

    `rank` is whose curves are drawn, None for all; `no_metrics` is what is said of a run that has none; `costs` are those
    of the attempts, in USD.
    """
    record, attempts = store.find(run_id), store.attempts(run_id)
    status, plan = record.status, attempts[-1].plan
    figures, logs = _figures(store, run_id, rank), _read_log(log)
    origin = store.provenance(run_id)
    client: Mapping[str, Any] = origin.get("client") or {}
    patch = str(origin.get("text") or "")
    packages = requirements(store.events(run_id, "requirements"))
    state = escape_text(status.state.value)
    facts = {
        "reason": status.reason,
        "why": f"{verdict.sentence} ({verdict.label})" if verdict and not verdict.only_reason else "",
        "log": verdict.deciding if verdict and verdict.where == "log" else "",
        "at": verdict.raised if verdict else "",
        "try": verdict.advice if verdict else "",
        "exit code": status.exit_code,
        "backend": f"{record.backend}, target {record.target}",
        "world": _world(plan.manifest),
        "runs": " ".join(map(str, plan.manifest.get("argv") or ())),
        "created": record.created_at,
        "started": status.started_at,
        "ended": status.ended_at,
        "parent": record.parent,
    }
    provenance = {
        "commit": f"{origin.get('commit')}{' with changes' if origin.get('dirty') else ''}"
        if origin.get("commit")
        else "",
        "not included in the patch": "\n".join(origin.get("left_out") or ()),
        "source": record.job.get("source"),
        "image": "\n".join(images.describe_images(attempts[-1].images)),
        "bundle": f"sha256 {plan.bundle.get('sha256')}",
        "submitted on": f"{client.get('host')}, {client.get('system')}" if client else "",
        "by": f"cloudtrain {client.get('cloudtrain')}, Python {client.get('python')}" if client else "",
    }
    parts = [
        f'<h1>{escape_text(run_id)}</h1><p><span class="state {state}">{state}</span></p>',
        _pairs(facts),
        _last_lines(logs, verdict),
        "<h2>Curves</h2>" + (figures[0] or _no_metrics(no_metrics)),
        "<h2>Use</h2>" + (figures[1] or '<p class="dim">nothing was reported</p>'),
        "<h2>Attempts</h2>" + _attempts(attempts, costs),
        _folded("timeline", _timeline(store, run_id)),
        "<h2>Provenance</h2>" + _pairs(provenance),
        _folded("patch", patch.splitlines()) if patch else "",
        _folded(f"packages ({len(packages)})", packages) if packages else "",
        "<h2>Job and plan</h2>",
        _folded("job", [json.dumps(dict(record.job), indent=2, ensure_ascii=False)]),
        _folded("request to the platform, as sent", [json.dumps(plan.request, indent=2, ensure_ascii=False)]),
        "<h2>Log</h2>",
        *_logs(logs),
    ]
    return document(run_id, parts, plotly=any(figures))


def document(title: str, parts: Iterable[str], *, plotly: bool) -> str:
    """Return a page of some parts, which are HTML; with the script of plotly where they have figures."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape_text(title)}</title><style>{_STYLE}</style>",
            f"<script>{_plotly()}</script>" if plotly else "",
            "</head><body>",
            *parts,
            "</body></html>",
            "",
        ]
    )


def write(
    store: Store, run_id: str, path: Path, *, verdict: Verdict | None, log: Iterable[LogLine], **more: Any
) -> Path:
    """Write a run's page into a file and return it; an error leaves no part of it."""
    return write_text(path, render(store, run_id, verdict, log, **more))


def write_text(path: Path, text: str) -> Path:
    """Write a page into a file and return it; an error leaves no part of it."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        partial.write_text(text, "utf-8", errors="replace")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _no_metrics(told: Sequence[str]) -> str:
    lines = "\n".join(map(escape_text, told[1:]))
    return f'<p class="dim">{escape_text(told[0] if told else "no metrics")}</p>' + (
        f"<pre>{lines}</pre>" if lines else ""
    )


def _figures(store: Store, run_id: str, rank: int | None) -> tuple[str, str]:
    """Return the curves and the use as HTML, empty where there is nothing to draw."""
    has_curves = bool(store.curves.summary(run_id, rank))
    curves = figure("curves", plots.curves(store, [run_id], rank=rank)) if has_curves else ""
    return curves, figure("use", use.use(store, run_id))


def figure(name: str, drawn: Any) -> str:
    """Return a plotly figure as HTML, empty for None."""
    if drawn is None:
        return ""
    data = json.loads(drawn.to_json())
    arguments = [json.dumps(part) for part in (data["data"], data["layout"], _CONFIG)]
    # Inside a script nothing is escaped by entities, and its end is looked for first of all.
    safe = ", ".join(arguments).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<div id="{name}"></div><script>Plotly.newPlot("{name}", {safe})</script>'


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def escape_text(value: object) -> str:
    """Return anything as text of a page: escaped, of control characters only tab and line end."""
    text = show_marks(str(value))
    if not text.isprintable():
        text = "".join(
            letter if letter in "\n\t" or (letter.isprintable() or letter == " ") else "�" for letter in text
        )
    return escape(text)


def _world(manifest: Mapping[str, Any]) -> str:
    nodes, processes = manifest.get("nodes"), manifest.get("processes_per_node")
    return f"{nodes} node{'' if nodes == 1 else 's'} x {processes} process{'' if processes == 1 else 'es'}"


def _pairs(rows: Mapping[str, object]) -> str:
    cells = [
        f"<tr><th>{escape_text(name)}</th><td>{escape_text(value)}</td></tr>"
        for name, value in rows.items()
        if value not in (None, "")
    ]
    return f"<table>{''.join(cells)}</table>"


def _folded(title: str, lines: Iterable[str], *, opened: bool = False) -> str:
    text = "\n".join(map(escape_text, lines))
    return f"<details{' open' if opened else ''}><summary>{escape_text(title)}</summary><pre>{text}</pre></details>"


def _attempts(attempts: Sequence[AttemptRecord], costs: Sequence[str]) -> str:
    heads = ("attempt", "on", "state", "exit", "started", "ended", *["USD"] * bool(costs), "reason")
    rows = [
        (
            a.number,
            a.plan.target or a.plan.backend,
            a.status.state,
            a.status.exit_code,
            a.status.started_at,
            a.status.ended_at,
            *costs[number : number + 1],
            a.status.reason,
        )
        for number, a in enumerate(attempts)
    ]
    return table(heads, rows)


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table of HTML; every cell is text, None an empty one. A wide table is scrolled."""
    body = "".join(
        "<tr>" + "".join(f"<td>{escape_text('' if cell is None else cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    top = "".join(f'<th scope="col">{escape_text(head)}</th>' for head in heads)
    return f'<div class="wide" tabindex="0"><table><tr>{top}</tr>{body}</table></div>'


def _timeline(store: Store, run_id: str) -> Iterator[str]:
    for event in store.events(run_id):
        if event.kind not in ("usage", "verdict"):
            fields = "  ".join(
                f"{name}={_brief(value)}" for name, value in event.data.items() if value not in (None, "", [], {})
            )
            where = "platform" if event.node == PLATFORM else f"node {event.node}"
            yield f"{event.at[:19]}Z  {event.attempt.rpartition('-')[2]}  {where}  {event.kind}  {fields}"


def _brief(value: object) -> str:
    """Return a value of an event, of a long list only its length: the page has the packages in a part of their own."""
    return f"{len(value):,} entries" if isinstance(value, list) and len(value) > LIST_ITEMS else str(value)


def _read_log(log: Iterable[LogLine]) -> dict[int, tuple[int, deque[str]]]:
    """Return node -> how many lines it has, and the last of them; events left out."""
    last: dict[int, deque[str]] = {}
    counts: dict[int, int] = {}
    for line in log:
        if (shown := without_event(line.text)) is None:
            continue
        counts[line.node] = counts.get(line.node, 0) + 1
        whose = f"{line.rank}" if line.rank >= 0 else "launcher"
        last.setdefault(line.node, deque(maxlen=LINES)).append(f"{line.at[11:19]}  {whose:>3}  {shown}")
    return {node: (counts[node], lines) for node, lines in sorted(last.items())}


def _last_lines(logs: Mapping[int, tuple[int, deque[str]]], verdict: Verdict | None) -> str:
    """Return the last lines of the node that failed. They are not folded: a browser prints no folded part."""
    if verdict is None or not logs:
        return ""
    node = verdict.node if verdict.node is not None and verdict.node in logs else min(logs)
    lines = "\n".join(map(escape_text, list(logs[node][1])[-LAST_LINES:]))
    return f'<h2>Last lines of node {node}</h2><pre class="last">{lines}</pre>'


def _logs(logs: Mapping[int, tuple[int, deque[str]]]) -> Iterator[str]:
    """Yield a part for every node."""
    for node, (count, lines) in logs.items():
        left = f", the last {LINES:,} of {count:,} lines" if count > LINES else ""
        yield _folded(f"node {node}{left}", lines, opened=len(logs) == 1)

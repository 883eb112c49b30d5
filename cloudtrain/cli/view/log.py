"""Print the log of a run: filter, prefix and clean its lines; keep the last ones of every rank."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cloudtrain import events
from cloudtrain.cli.view.terminal import LineWriter, clean, is_terminal, note
from cloudtrain.diagnosis.tail import Tail
from cloudtrain.events import State

if TYPE_CHECKING:
    from pathlib import Path

    from cloudtrain.events import LogLine
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.runs.run import Run

# After these times `--follow` on a pipe prints that there is no output yet: of a run that waits, and of one that runs.
WAITING_S, SILENT_S = 5.0, 60.0
KEPT_LINES = 60  # of every rank
TRACEBACK = "Traceback (most recent call last):"


class LineFormatter:
    """Format log lines; `format` returns the text of a line, or None for a line that is not printed.

    It leaves out events (marked lines) and the lines of other nodes, ranks or roles. With several ranks every line begins
    with `[node:rank]`, or `[role node:rank]`. On a terminal it removes control sequences; a pipe gets the text as it is.
    `raw` prints exactly what the job wrote, events included. `as_json` prints every line as an object. `number` prints a
    line's number on its node.
    """

    def __init__(
        self,
        attempt: AttemptRecord,
        *,
        node: int | None = None,
        rank: int | None = None,
        role: str | None = None,
        raw: bool = False,
        as_json: bool = False,
        number: bool = False,
    ) -> None:
        manifest = attempt.plan.manifest
        self._all = node is None and rank is None and role is None
        self._node, self._rank = node, rank
        self._roles = attempt.plan.node_roles
        if role is not None:
            attempt.plan.nodes_of(role)  # raises BadRequest
        self._role = role
        self._platform = attempt.plan.backend  # Slurm's own lines
        self._prefixed = not raw and int(manifest["nodes"]) * int(manifest["processes_per_node"]) > 1
        self._clean: Callable[[str], str] | None = clean if is_terminal() and not raw else None
        self._encode = json.JSONEncoder(ensure_ascii=False).encode if as_json else None
        self._raw = raw
        self._number = number
        self.for_people = not raw and not as_json
        self._prefixes: dict[tuple[int, int], str] = {}

    def format(self, line: LogLine) -> str | None:
        timestamp, node, rank, seq, text, cursor = line
        if not self._all and (self._node not in (None, node) or self._rank not in (None, rank)):
            return None
        if self._role is not None and self._role_of(node) != self._role:
            return None
        if self._encode:
            return self._encode(
                {"at": timestamp, "node": node, "rank": rank, "seq": seq, "text": text, "cursor": cursor}
            )
        if self._raw:
            return text
        if (shown := events.without_event(text)) is None:
            return None
        text = shown
        if self._clean and not text.isprintable():
            text = self._clean(text)
        if self._prefixed or rank < 0:
            text = self._prefix(node, rank) + text
        return f"{seq:>6}  {text}" if self._number else text

    def _role_of(self, node: int) -> str:
        return self._roles[node] if 0 <= node < len(self._roles) else ""

    def _prefix(self, node: int, rank: int) -> str:
        prefix = self._prefixes.get((node, rank))
        if prefix is None:
            role = f"{self._role_of(node)} " if self._roles else ""
            prefix = f"[{role}{node}:{rank if rank >= 0 else 'launcher'}] " if self._prefixed else "[launcher] "
            if node == events.PLATFORM:
                prefix = f"[{self._platform}] "
            self._prefixes[node, rank] = prefix
        return prefix


class LastLines(Tail):
    """The last lines of every rank of the newest attempt, to print them when it fails."""

    def __init__(self) -> None:
        super().__init__(KEPT_LINES)
        self._attempt = ""

    def add(self, line: LogLine) -> None:
        """Keep a line."""
        attempt = line.cursor.partition("/")[0]
        if attempt != self._attempt:
            self._attempt = attempt
            self._lines.clear()
        super().add(line)

    @property
    def single_rank(self) -> bool:
        """Whether at most one rank has printed: then its last lines are the end of the log."""
        return sum(rank >= 0 for _, rank in self._lines) <= 1

    def failure_lines(self, failed_rank: int | None) -> tuple[str, list[str]]:
        """Return the name of the rank that explains the failure, and its lines.

        It is the failed rank, else the rank with the first traceback, else the launcher. The lines start at its last
        traceback, or are its last 20.
        """
        ranks = {node_rank: lines for node_rank, lines in self._lines.items() if node_rank[1] >= 0} or self._lines
        if not ranks:
            return "", []
        node_rank = next((node_rank for node_rank in ranks if node_rank[1] == failed_rank), None) or min(
            ranks, key=lambda node_rank: _first_traceback(ranks[node_rank])
        )
        texts = [line.text for line in ranks[node_rank]]
        begin = max((index for index, text in enumerate(texts) if text.startswith(TRACEBACK)), default=None)
        # A chained exception prints several tracebacks: start at the first of the chain.
        while begin is not None and (above := _previous_in_chain(texts, begin)) is not None:
            begin = above
        excerpt = texts[begin if begin is not None else -20 :]
        name = (
            f"node {node_rank[0]}, rank {node_rank[1]}" if node_rank[1] >= 0 else f"the launcher of node {node_rank[0]}"
        )
        return name, excerpt


def _previous_in_chain(texts: list[str], begin: int) -> int | None:
    preceding = " ".join(texts[max(0, begin - 3) : begin])
    if "direct cause of the following exception" in preceding or "another exception occurred" in preceding:
        return max((index for index in range(begin) if texts[index].startswith(TRACEBACK)), default=None)
    return None


def _first_traceback(lines: Sequence[LogLine]) -> tuple[bool, str]:
    """Return a sort key: first the rank with the earliest traceback, then the one that printed last."""
    times = [line.at for line in lines if line.text.startswith(TRACEBACK)]
    return (not times, times[0] if times else lines[-1].at)


def print_log(
    run: Run,
    formatter: LineFormatter,
    *,
    follow: bool = False,
    after: str | None = None,
    tail: int | None = None,
    last_lines: LastLines | None = None,
) -> str | None:
    """Print a run's log after a cursor, with `follow` until the run is final; return the last cursor. Blocking."""
    cursor = after
    with _open_output(run, formatter, follow) as out:
        if tail is not None:
            last: deque[str] = deque(maxlen=tail)
            for line in run.logs(after=cursor, raw=True):
                cursor = line.cursor
                if (text := formatter.format(line)) is not None:
                    last.append(text)
            for text in last:
                out.add(text)
            if not follow:
                return cursor
        format_line, add = formatter.format, out.add
        printed = threading.Event()
        if follow and formatter.for_people and not is_terminal():
            threading.Thread(target=_note_silence, args=(run.store.home, run.run_id, printed), daemon=True).start()
        try:
            for line in run.logs(follow=follow, after=cursor, raw=True):
                cursor = line.cursor
                if last_lines:
                    last_lines.add(line)
                if (text := format_line(line)) is not None:
                    printed.set()
                    add(text)
        except KeyboardInterrupt as stop:
            raise Interrupted(cursor) from stop
        finally:
            printed.set()
    return cursor


def _note_silence(home: Path, run_id: str, printed: threading.Event) -> None:
    """Say once that a run has printed nothing for a while; blocking. A terminal has a live panel instead."""
    from cloudtrain.history.store import Store

    for waited_s, more_s in ((WAITING_S, WAITING_S), (SILENT_S, SILENT_S - WAITING_S)):
        if printed.wait(more_s):
            return
        record = Store(home).get(run_id)
        if record is None or record.status.state.final:
            return
        if record.status.state is State.QUEUED or waited_s == SILENT_S:
            note(f"{run_id}: {record.status.state}; no output yet")
            return


def _open_output(run: Run, formatter: LineFormatter, follow: bool) -> LineWriter:
    """Return the writer of the lines: with a live panel when a person follows the log on a terminal."""
    if follow and formatter.for_people and is_terminal():
        from cloudtrain.cli.view import live

        if live.is_supported():
            return live.LiveView(run)
    return LineWriter()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while following; `cursor` is the position to continue from."""

    def __init__(self, cursor: str | None) -> None:
        super().__init__()
        self.cursor = cursor

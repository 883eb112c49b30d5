"""Lines of a run's log on the screen: chosen, prefixed, cleaned, and remembered for the end."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from cloudtrain import events
from cloudtrain.cli.view.terminal import Lines, clean, is_terminal

if TYPE_CHECKING:
    from cloudtrain.events import LogLine
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.runs.run import Run

KEPT = 60  # last lines of every rank that are remembered
TRACEBACK = "Traceback (most recent call last):"


class Screen:
    """How lines are shown; `show` returns the text of a line, or None for one that is not shown.

    Marked lines and those of other nodes or ranks are left out; `[node:rank]` stands before each where there are
    several ranks. On a terminal control sequences are taken out; a pipe gets the text as it is. `raw` is exactly what
    the job wrote, marked lines too; `as_json` is every line as an object.
    """

    def __init__(
        self,
        attempt: AttemptRecord,
        *,
        node: int | None = None,
        rank: int | None = None,
        raw: bool = False,
        as_json: bool = False,
    ) -> None:
        manifest = attempt.plan.manifest
        self._all = node is None and rank is None
        self._node, self._rank = node, rank
        self._prefixed = not raw and int(manifest["nodes"]) * int(manifest["processes_per_node"]) > 1
        self._clean: Callable[[str], str] | None = clean if is_terminal() and not raw else None
        self._encode = json.JSONEncoder(ensure_ascii=False).encode if as_json else None
        self._raw = raw
        self.for_people = not raw and not as_json
        self._prefixes: dict[tuple[int, int], str] = {}

    def show(self, line: LogLine) -> str | None:
        at, node, rank, seq, text, cursor = line
        if not self._all and (self._node not in (None, node) or self._rank not in (None, rank)):
            return None
        if self._encode:
            return self._encode({"at": at, "node": node, "rank": rank, "seq": seq, "text": text, "cursor": cursor})
        if self._raw:
            return text
        if text.startswith(events.MARK) and events.parse(text):
            return None
        if self._clean and not text.isprintable():
            text = self._clean(text)
        if self._prefixed or rank < 0:
            return self._prefix(node, rank) + text
        return text

    def _prefix(self, node: int, rank: int) -> str:
        found = self._prefixes.get((node, rank))
        if found is None:
            found = (f"[{node}:{rank}] " if rank >= 0 else f"[{node}:launcher] ") if self._prefixed else "[launcher] "
            self._prefixes[node, rank] = found
        return found


class Memory:
    """The last lines of every rank of the newest attempt, to show again why it failed."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], deque[LogLine]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._attempt = ""

    def add(self, line: LogLine) -> None:
        """Remember a line."""
        attempt = line.cursor.partition("/")[0]
        if attempt != self._attempt:
            self._attempt = attempt
            self._last.clear()
        self._last[line.node, line.rank].append(line)

    @property
    def alone(self) -> bool:
        """Whether one rank at most has spoken, so that what it said last is what was printed last."""
        return sum(rank >= 0 for _, rank in self._last) <= 1

    def why(self, failed_rank: int | None) -> tuple[str, list[str]]:
        """Return whose lines tell why, and those lines: of the failed rank, else of the first that shows a traceback.

        From the last traceback on, or the last few; those of the launcher when no rank has said anything.
        """
        told = {
            where: [line for line in lines if not line.text.startswith(events.MARK)]
            for where, lines in self._last.items()
        }
        told = {where: lines for where, lines in told.items() if lines}
        ranks = {where: lines for where, lines in told.items() if where[1] >= 0} or told
        if not ranks:
            return "", []
        where = next((where for where in ranks if where[1] == failed_rank), None) or min(
            ranks, key=lambda where: _first_sign(ranks[where])
        )
        texts = [line.text for line in ranks[where]]
        begin = max((at for at, text in enumerate(texts) if text.startswith(TRACEBACK)), default=None)
        # An exception with causes is several tracebacks: the first of the chain comes first.
        while begin is not None and (above := _chained(texts, begin)) is not None:
            begin = above
        shown = texts[begin if begin is not None else -20 :]
        name = f"node {where[0]}, rank {where[1]}" if where[1] >= 0 else f"the launcher of node {where[0]}"
        return name, shown


def _chained(texts: list[str], begin: int) -> int | None:
    before = " ".join(texts[max(0, begin - 3) : begin])
    if "direct cause of the following exception" in before or "another exception occurred" in before:
        return max((at for at in range(begin) if texts[at].startswith(TRACEBACK)), default=None)
    return None


def _first_sign(lines: list[LogLine]) -> tuple[bool, str]:
    """Return a key that puts the rank first whose traceback came first, then the one that spoke last."""
    signs = [line.at for line in lines if line.text.startswith(TRACEBACK)]
    return (not signs, signs[0] if signs else lines[-1].at)


def print_log(
    run: Run,
    screen: Screen,
    *,
    follow: bool = False,
    after: str | None = None,
    tail: int | None = None,
    memory: Memory | None = None,
) -> str | None:
    """Print a run's lines behind a cursor, with `follow` until it is final; return the last cursor. Blocking."""
    cursor = after
    with _out(run, screen, follow) as out:
        if tail is not None:
            last: deque[str] = deque(maxlen=tail)
            for line in run.logs(after=cursor, raw=True):
                cursor = line.cursor
                if (text := screen.show(line)) is not None:
                    last.append(text)
            for text in last:
                out.add(text)
            if not follow:
                return cursor
        show, add = screen.show, out.add
        try:
            for line in run.logs(follow=follow, after=cursor, raw=True):
                cursor = line.cursor
                if memory:
                    memory.add(line)
                if (text := show(line)) is not None:
                    add(text)
        except KeyboardInterrupt as stop:
            raise Interrupted(cursor) from stop
    return cursor


def _out(run: Run, screen: Screen, follow: bool) -> Lines:
    """Return where the lines go: with a live view below them when a person follows them on a terminal."""
    if follow and screen.for_people and is_terminal():
        from cloudtrain.cli.view import live

        if live.wanted():
            return live.Live(run)
    return Lines()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while following; `cursor` is where to go on."""

    def __init__(self, cursor: str | None) -> None:
        super().__init__()
        self.cursor = cursor

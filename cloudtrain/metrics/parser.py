"""Finds metrics in the log lines of a script that knows nothing of cloudtrain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.events import ESCAPE, OFF, STEPS, Point
from cloudtrain.metrics.bars import Bar, is_part_of_bar, parse_bar, parse_keras_bar
from cloudtrain.metrics.dicts import parse_dict, to_number
from cloudtrain.metrics.lines import is_header, parse_line, parse_position
from cloudtrain.metrics.names import Kind, is_environment, kind
from cloudtrain.metrics.steps import EPOCH_TITLE, Steps
from cloudtrain.metrics.tables import Table, is_row

STEP_KEYS = ("step", "global_step", "iteration", "iter", "num_updates", "train/global_step", "trainer/global_step")
AXES = {*STEP_KEYS, "epoch", "total_flos"}
_WAIT = 4  # lines of a rank within which tqdm draws its bar again behind a dictionary
_TRACKER = "wandb: "  # the summary of a run says its last values again, without their steps
_HEADING = re.compile(r"\s*Epoch (\d{1,9})/\d{1,9}\s*")
_BEFORE_DICT = re.compile(  # what may stand before a dictionary of metrics, other than the head of a log line
    r"(?:.*(?:\b|_)(?:losses|metrics?|results?|scores?|stats|evaluation|eval|train|val|validation|test|epoch[\s:=]*\d+|step[\s:=]*\d+)"
    r"|.{0,120}\b(?:INFO|DEBUG)\b.*|\[?rank ?\d+\]?)\W*",
    re.IGNORECASE | re.DOTALL,
)


class MetricParser:
    """Finds metrics in ordinary lines: known shapes, and the user's own regular expressions.

    The first group of an expression is the value (the form that SageMaker uses); groups named `value`, `step` and `epoch`
    say it in words. A name that has an expression is found by that alone.

    Args:
        patterns: Name -> the user's expression, or `off`; where `*` is off, the expressions are all that is looked for.
        seen: Rank and name -> step of the attempt's last point, where another parser has read its log up to here.
        earlier: The same of the run's earlier attempts, where a count continues.
        first_epoch: The first epoch of the run that is stored.
        per_epoch: Rank and name -> steps in an epoch, as the earlier attempts counted them.
    """

    def __init__(
        self,
        patterns: Mapping[str, str],
        seen: Mapping[tuple[int, str], int] | None = None,
        earlier: Mapping[tuple[int, str], int] | None = None,
        first_epoch: float | None = None,
        per_epoch: Mapping[tuple[int, str], float] | None = None,
    ) -> None:
        self._reads_shapes = patterns.get("*") != OFF
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items() if pattern != OFF}
        self._not_in_shapes = set(patterns)
        self._seen, self._earlier, self._per_epoch = dict(seen or {}), dict(earlier or {}), dict(per_epoch or {})
        self._first_epoch = first_epoch
        self._steps: dict[int, Steps] = {}
        self._tables: dict[int, Table] = {}
        self._below = set[int]()  # ranks that are printing a table
        self._waiting: dict[int, tuple[int, dict[str, float], float | None]] = {}  # rank -> a row without its step

    def metrics(self, text: str, rank: int = 0) -> Iterator[Point]:
        """Return the metrics that one line of a rank's log holds or completes."""
        if not (self._reads_shapes or self._patterns):
            return iter(())
        if rank in self._waiting or self._patterns or _is_candidate(text) or (rank in self._below and is_row(text)):
            return self._found(text, rank)
        return iter(())  # most lines: what they cost is what following a log costs

    def flush(self) -> list[tuple[int, list[Point]]]:
        """Return each rank with the points that waited for a line that has not come: the log has ended."""
        return [(rank, list(self._release(rank))) for rank in list(self._waiting)]

    def _found(self, text: str, rank: int) -> Iterator[Point]:
        if "\x1b" in text or "\x08" in text:
            text = ESCAPE.sub("", text).replace("\x08", "")
        steps = self._of(rank)
        for piece in text.split("\r"):
            if self._reads_shapes and piece.strip() and not piece.lstrip().startswith(_TRACKER):
                yield from self._in_piece(piece, rank, steps)
        for name, pattern in self._patterns.items():
            for match in pattern.finditer(text):
                groups = match.groupdict()
                value = to_number(groups["value"] if "value" in groups else _first(match, pattern))
                if value is not None:
                    step, epoch = _step(groups.get("step")), to_number(groups.get("epoch"))
                    at = steps.implicit(name, epoch) if step is None else steps.explicit(name, step)
                    yield Point(at, name, value, epoch)

    def _of(self, rank: int) -> Steps:
        if rank not in self._steps:
            seen, earlier, per_epoch = (_of_rank(steps, rank) for steps in (self._seen, self._earlier, self._per_epoch))
            self._steps[rank], self._tables[rank] = Steps(seen, earlier, per_epoch, self._first_epoch), Table()
        return self._steps[rank]

    def _in_piece(self, text: str, rank: int, steps: Steps) -> Iterator[Point]:
        """Yield what a line says, of which a bar may be the first part."""
        bar = parse_bar(text)
        if bar is not None:
            yield from self._in_bar(bar, rank, steps)
            text = text[bar.end :]
            if not text.strip():
                return
        if rank in self._waiting:
            left, row, epoch = self._waiting[rank]
            if left > 0 and bar is not None:
                self._waiting[rank] = (left - 1, row, epoch)
            else:
                yield from self._release(rank)
        if "{'" in text or '{"' in text:
            yield from self._in_dict(text, bar, rank, steps)
        elif bar is None:
            yield from self._in_line(text, rank, steps)

    def _in_bar(self, bar: Bar, rank: int, steps: Steps) -> Iterator[Point]:
        step = steps.show_bar(bar)
        if rank in self._waiting and steps.is_beside(bar.size):
            yield from self._release(rank)
        title = EPOCH_TITLE.search(bar.title)
        epoch = float(title[1]) if title else steps.epoch
        fields = {
            name: value for name, raw in bar.fields if (value := to_number(raw)) is not None and not _names_place(name)
        }
        for name, value in self._without_patterns(fields).items():
            at = steps.in_bar(name, bar.done, bar.size, float(title[1]) if title else None)
            if at is not None:
                yield Point(at, name, value, epoch)
        if "%|" in bar.title and not fields:
            head = bar.title[: bar.title.rindex("%|")].rpartition(":")[0]
            row = self._tables[rank].read(head)
            if row and bar.done == bar.size:
                yield from self._row(*row, steps)
            elif not row and ":" in head:
                for name, value in self._without_patterns(parse_line(head).values).items():
                    yield Point(steps.explicit(name, step), name, value, epoch)

    def _in_dict(self, text: str, bar: Bar | None, rank: int, steps: Steps) -> Iterator[Point]:
        start = min(at for at in (text.find("{'"), text.find('{"')) if at >= 0)
        head, literal = text[:start].strip(), text[start:].rstrip()
        if not literal.endswith("}") or (head and not _BEFORE_DICT.fullmatch(head)):
            return
        row = parse_dict(literal)
        named = head.lower().rstrip(": ").endswith(("losses", "metrics", "scores"))
        values = self._without_patterns(_metrics(row, named=named))
        if not values:
            return
        epoch = to_number(row.get("epoch"))
        step = next((step for key in STEP_KEYS if (step := _step(row.get(key))) is not None), None)
        if head and step is None:
            position = parse_position(head)
            step, epoch = steps.globalize(position), position.epoch if epoch is None else epoch
        if step is not None:
            for name, value in values.items():
                yield Point(steps.explicit(name, step), name, value, epoch)
            return
        self._waiting[rank] = (_WAIT, values, epoch)
        if bar is not None or not steps.is_behind:
            yield from self._release(rank)

    def _in_line(self, text: str, rank: int, steps: Steps) -> Iterator[Point]:
        if "Epoch" in text and (heading := _HEADING.fullmatch(text)):
            steps.epoch = float(heading[1])
            return
        table = self._tables[rank]
        if row := table.read(text):
            yield from self._row(*row, steps)
            return
        if table.is_open:
            self._below.add(rank)
        keras = parse_keras_bar(text) if "/" in text else None
        position, found, evaluation = parse_line(text[keras[2] :] if keras else text)
        values = {} if is_part_of_bar(text) else self._without_patterns(found)
        if keras and values:
            for name, value in values.items():
                at = steps.in_bar(name, keras[0], keras[1], steps.epoch)
                if at is not None:
                    yield Point(at, name, value, steps.epoch)
            return
        step = steps.globalize(position)
        if not values:
            if (step is not None or position.epoch is not None) and (found or is_header(text)):
                steps.name_place(step, position.epoch)
            return
        epoch = steps.heading if step is None and position.epoch is None else position.epoch
        for name, value in values.items():
            at = steps.implicit(name, epoch, same=evaluation) if step is None else steps.explicit(name, step)
            yield Point(at, name, value, epoch)

    def _row(self, axes: dict[str, int], values: dict[str, float], steps: Steps) -> Iterator[Point]:
        step, epoch = axes.get("step", axes.get("epoch")), axes.get("epoch")
        for name, value in self._without_patterns(values).items():
            at = steps.implicit(name, None) if step is None else steps.explicit(name, step)
            yield Point(at, name, value, None if epoch is None else float(epoch))

    def _without_patterns(self, values: dict[str, float]) -> dict[str, float]:
        if self._not_in_shapes:
            return {name: value for name, value in values.items() if name not in self._not_in_shapes}
        return values

    def _release(self, rank: int) -> Iterator[Point]:
        _, values, epoch = self._waiting.pop(rank)
        steps = self._of(rank)
        for name, value in values.items():
            yield Point(steps.implicit(name, epoch), name, value, epoch)


def _of_rank(values: Mapping[tuple[int, str], Any], rank: int) -> dict[str, Any]:
    return {name: value for (of, name), value in values.items() if of == rank}


def _names_place(name: str) -> bool:
    """Return whether a bar's field says where the training stands, not how good it is."""
    return name == "v_num" or name.lower().rpartition("/")[2] in AXES


def _is_candidate(text: str) -> bool:
    """Return whether a line may hold a metric or a step."""
    low = text.lower()
    return (
        "loss" in low or "acc" in low or "epoch" in low or "step" in low or "{'" in low or '{"' in low or "/s" in low
        or "ppl" in low or "iter" in low or "s/" in low or "auc" in low or "rew" in low or "ret" in low or "l2" in low
        or "error" in low or "perplex" in low or "psnr" in low or "f1" in low or "bleu" in low or "mse" in low
        or "mae" in low or "iou" in low or "score" in low or "wer" in low or "learn" in low
    )  # fmt: skip


def _metrics(row: Mapping[Any, Any], *, named: bool) -> dict[str, float]:
    """Return the metrics of a printed dictionary; none where it is an environment or a configuration.

    Args:
        row: The dictionary.
        named: Whether the words before it say that these are metrics.
    """
    names = [name for name in row if isinstance(name, str)]
    values = {
        name: value for name in names if name not in AXES and (value := to_number(row[name])) is not None
    }  # fmt: skip
    if is_environment(names):
        return {}
    if any(kind(name) is Kind.METRIC for name in values):
        return values
    settings = [name for name in names if name not in AXES and kind(name) is Kind.SETTING]
    texts = [name for name in values if isinstance(row[name], str)]
    if named or not (settings or texts):
        return values
    return values if any(name.endswith("_runtime") for name in names) else {}


def _step(raw: Any) -> int | None:
    number = to_number(raw)
    return int(number) if number is not None and abs(number) < STEPS else None


def _first(match: re.Match[str], pattern: re.Pattern[str]) -> str:
    """Return the first group that is not the step, or the whole match where there is none."""
    step = pattern.groupindex.get("step")
    numbers = [number for number in range(1, pattern.groups + 1) if number != step]
    return match[numbers[0]] if numbers else match[0]

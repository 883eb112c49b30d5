"""In what order metrics are drawn, in which sections, and which of them share one chart."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cloudtrain.events import is_evaluation
from cloudtrain.history.curves import metric_order

_WORTH = tuple(
    re.compile(rf"(?:^|[^a-z])(?:{words})(?:$|[^a-z])", re.IGNORECASE)
    for words in (
        "loss|nll|perplexity|ppl|bpb|bpc|cross_?entropy",
        "acc|accuracy|f1|auc|auroc|precision|recall|bleu|rouge\\w*|reward|return|score|iou|map|exact_match|win_rate",
        "lr|learning_rate|(?:grad(?:ient)?_)?norm",
    )
)
_NUMBER = re.compile(r"(?<=[/.])\d+(?=[/.]|$)")
FEWEST = 2  # numbered metrics that share a chart


@dataclass(frozen=True)
class Chart:
    """A chart: its title and its metrics, several where they differ in one number (`layers/0/norm`, `layers/1/norm`)."""

    title: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """The charts of one prefix; "" is that of metrics without one."""

    prefix: str
    charts: tuple[Chart, ...]


def worth(name: str, wanted: Collection[str] = ()) -> int:
    """Return the class of a metric, 0 first: wanted, loss, evaluation, accuracy-like, learning rate and norms, the rest."""
    if name in wanted:
        return 0
    loss, accuracy, norm = (pattern.search(name) is not None for pattern in _WORTH)
    return 1 if loss else 2 if is_evaluation(name) else 3 if accuracy else 4 if norm else 5


def arrange(names: Iterable[str], wanted: Collection[str] = ()) -> list[Section]:
    """Return metrics in sections: the best chart decides the place of a section, its name that of equals.

    Args:
        names: The metrics.
        wanted: Those that the job names or a sweep optimizes.
    """
    families: dict[str, list[str]] = {}
    for name in sorted(dict.fromkeys(names), key=metric_order):
        families.setdefault(_NUMBER.sub("*", name, count=1), []).append(name)
    charts = [chart for family, of in families.items() for chart in _charts(family, of)]
    place = {chart: (min(worth(name, wanted) for name in chart.names), is_evaluation(chart.title)) for chart in charts}
    sections: dict[str, list[Chart]] = {}
    for chart in sorted(charts, key=lambda chart: place[chart]):
        sections.setdefault(chart.title.partition("/")[0] if "/" in chart.title else "", []).append(chart)
    return [Section(prefix, tuple(of)) for prefix, of in sections.items()]


def _charts(family: str, names: list[str]) -> list[Chart]:
    if "*" not in family or len(names) < FEWEST:
        return [Chart(name, (name,)) for name in names]
    first, last = (_NUMBER.search(name) for name in (names[0], names[-1]))
    assert first and last
    return [Chart(family.replace("*", f"{first[0]}..{last[0]}", 1), tuple(names))]


def member(name: str) -> str:
    """Return the number by which a metric differs from the others of its chart."""
    found = _NUMBER.search(name)
    return found[0] if found else name

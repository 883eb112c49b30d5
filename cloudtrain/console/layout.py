"""Which charts a person has pinned, hidden, moved, resized or closed; kept for each project (a job's name) in the home."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields

from cloudtrain.history.store import Store
from cloudtrain.report.sections import Chart, Section, arrange

PINNED = "Pinned"
MOST = 1000  # names that a layout keeps of each kind
LEAST_PX, MOST_PX = 160, 1200  # height of a chart


@dataclass
class Layout:
    """Titles of charts, and prefixes of sections."""

    pinned: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # of charts that were moved
    opened: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    wide: list[str] = field(default_factory=list)  # charts over the whole width
    heights: dict[str, int] = field(default_factory=dict)  # chart -> its height in pixels

    def arrange(self, names: Collection[str], wanted: Collection[str]) -> list[Section]:
        """Return the sections of metrics: first the pinned charts, without the hidden ones, moved ones in their order."""
        place = {title: at for at, title in enumerate(self.order)}
        sections, pinned = [], dict[str, Chart]()
        for section in arrange(names, wanted):
            shown = [chart for chart in section.charts if chart.title not in self.hidden]
            pinned |= {chart.title: chart for chart in shown if chart.title in self.pinned}
            moved = iter(sorted((c for c in shown if c.title in place), key=lambda chart: place[chart.title]))
            ordered = [next(moved) if chart.title in place else chart for chart in shown]
            sections.append(Section(section.prefix, tuple(c for c in ordered if c.title not in self.pinned)))
        first = Section(PINNED, tuple(pinned[title] for title in self.pinned if title in pinned))
        return [section for section in (first, *sections) if section.charts]

    def drawn(self, sections: Sequence[Section], most: int) -> dict[str, Sequence[Chart]]:
        """Return the charts to draw of each section: of the first ones `most` altogether, none of those that are closed."""
        left, found = most, dict[str, Sequence[Chart]]()
        for section in sections:
            count = 0 if section.prefix in self.closed else most if section.prefix in self.opened else left
            found[section.prefix] = section.charts[:count]
            left -= min(left, len(found[section.prefix]))
        return found

    def toggle(self, kind: str, name: str) -> None:
        """Put a name into one of the lists, or take it out."""
        of: list[str] = getattr(self, kind)
        of.remove(name) if name in of else of.append(name)

    def set_open(self, prefix: str, is_open: bool) -> None:
        """Note that a person has opened or closed a section."""
        for of, wanted in ((self.opened, is_open), (self.closed, not is_open)):
            if wanted != (prefix in of):
                of.append(prefix) if wanted else of.remove(prefix)

    def resize(self, title: str, height: float, wide: bool) -> None:
        """Give a chart another height, and the whole width or one column."""
        self.heights[title] = round(min(max(height, LEAST_PX), MOST_PX))
        if wide != (title in self.wide):
            self.toggle("wide", title)

    def move(self, title: str, before: str, section: Sequence[str]) -> None:
        """Move a chart to the place of another one of its section."""
        if title in self.pinned and before in self.pinned:
            self.pinned = _moved(self.pinned, title, before)
        elif title in section and before in section:
            self.order = [*(each for each in self.order if each not in section), *_moved(section, title, before)]


def wanted(store: Store, run_ids: Sequence[str]) -> set[str]:
    """Return the metrics that the jobs of runs name, or that a sweep of theirs optimizes."""
    ids = json.dumps(list(run_ids))
    named = "SELECT DISTINCT json_extract(job, '$.metrics') FROM runs WHERE run_id IN (SELECT value FROM json_each(?))"
    sweeps = (
        "SELECT DISTINCT spec FROM sweeps WHERE sweep_id IN"
        " (SELECT sweep_id FROM trials WHERE run_id IN (SELECT value FROM json_each(?)))"
    )
    found = set[str]()
    for (metrics,) in store.select(named, (ids,)):
        if metrics and metrics.startswith("{"):
            found |= set(json.loads(metrics))
    for (spec,) in store.select(sweeps, (ids,)):
        keys = json.loads(spec)
        keys = keys.get("document") or {}
        given = [keys.get("metric"), *(keys.get("metrics") or ())]
        found |= {str(each["name"]) for each in given if isinstance(each, dict) and each.get("name")}
    return found


def read(store: Store, project: str) -> Layout:
    """Return the layout of a project."""
    rows = store.select("SELECT layout FROM layouts WHERE project = ?", (project,))
    return of_json(rows[0][0]) if rows else Layout()


def write(store: Store, project: str, layout: Layout) -> None:
    """Keep the layout of a project."""
    with store.database.translated_errors(), store.database.write() as db:
        db.execute("INSERT OR REPLACE INTO layouts VALUES (?, ?)", (project, to_json(layout)))


def to_json(layout: Layout) -> str:
    """Return a layout as the home keeps it, and as people share it."""
    return json.dumps(asdict(layout), indent=1)


def of_json(text: str) -> Layout:
    """Return the layout of its JSON; what is no list of names is left out."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return Layout()
    data = data if isinstance(data, dict) else {}
    given = {each.name: data.get(each.name) for each in fields(Layout)}
    layout = Layout()
    for name, of in given.items():
        if isinstance(of, list) and name != "heights":
            setattr(layout, name, [title for title in of if isinstance(title, str)][:MOST])
    heights = given["heights"] if isinstance(given["heights"], dict) else {}
    known = [(title, height) for title, height in heights.items() if type(height) is int][:MOST]
    layout.heights = {title: min(max(height, LEAST_PX), MOST_PX) for title, height in known}
    return layout


def _moved(titles: Sequence[str], title: str, before: str) -> list[str]:
    """Return titles with one of them at the place of another."""
    at, rest = list(titles).index(before), [each for each in titles if each != title]
    return [*rest[:at], title, *rest[at:]]

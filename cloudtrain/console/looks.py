"""The runs of a comparison: which are hidden, which are in a chart, the baseline, colours; in the address by their places."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote, unquote

from cloudtrain.console import charts, curvestyle, lists, runrows, text, widgets
from cloudtrain.events import State
from cloudtrain.report import plots

_COLOUR = re.compile(r"(\d{1,3})-([0-9a-f]{6})")


class Legend:
    """The list of runs above their charts. `runs` are (id, label, short name, state)."""

    def __init__(
        self, curves: charts.Curves, style: curvestyle.CurveStyle, runs: Sequence[tuple[str, str, str, State]]
    ) -> None:
        self._curves, self._style, self._runs = curves, style, runs

    def show(self) -> None:
        """Draw it; needs `Curves.show` before a person clicks."""
        self._list = lists.legend()
        for name in ("hide", "only", "baseline", "colour"):
            self._list.on(name, lambda event, name=name: self._change(name, event.args))
        self._draw()

    async def _change(self, what: str, given: object) -> None:
        ids = [run_id for run_id, *_ in self._runs]
        change(self._style, ids, what, given)
        self._draw()
        await self._curves.change()

    def _draw(self) -> None:
        style = self._style
        self._list.props["rows"] = tuple(
            (
                run_id, text.clean(label, 200), runrows.run_link(run_id), text.clean(short, 80),
                style.colours.get(run_id, plots.colour_of(at)), state.value, widgets.state_class(state),
                run_id in style.hidden, run_id == style.baseline,
            )
            for at, (run_id, label, short, state) in enumerate(self._runs)
        )  # fmt: skip


def change(style: curvestyle.CurveStyle, ids: Sequence[str], what: str, given: object) -> None:
    """Change how runs are drawn: `hide` one or show it again, `only` one or all again, `baseline`, `colour`."""
    if what == "colour" and isinstance(given, list) and len(given) == 2 and given[0] in ids:
        if re.fullmatch("#[0-9a-f]{6}", str(given[1])):
            style.colours = {**style.colours, given[0]: given[1]}
    elif given in ids:
        run_id, others = str(given), frozenset(each for each in ids if each != given)
        if what == "hide":
            style.hidden = style.hidden ^ {run_id} if style.hidden | {run_id} != {*ids} else style.hidden
        elif what == "only":
            style.hidden = frozenset() if style.hidden == others else others
        elif what == "baseline":
            style.baseline = "" if style.baseline == run_id else run_id


def address(style: curvestyle.CurveStyle, ids: Sequence[str]) -> dict[str, str]:
    """Return what differs from the usual looks, for the query of an address."""
    place = {run_id: str(at) for at, run_id in enumerate(ids)}
    found = {
        "hide": ",".join(place[run_id] for run_id in ids if run_id in style.hidden),
        "baseline": place.get(style.baseline, ""),
        "colours": ",".join(f"{place[run_id]}-{colour[1:]}" for run_id, colour in style.colours.items()),
        "some": ",".join(
            f"{'-'.join(place[run_id] for run_id in ids if run_id in some)}:{quote(title, safe='')}"
            for title, some in style.some.items()
            if some
        ),
    }
    return {name: value for name, value in found.items() if value}


def of_address(
    style: curvestyle.CurveStyle, ids: Sequence[str], hide: str, baseline: str, colours: str, some: str = ""
) -> None:
    """Set the looks that an address asks for; what it cannot be is left out."""
    run_at = {str(at): run_id for at, run_id in enumerate(ids)}
    hidden = frozenset(run_at[at] for at in hide.split(",") if at in run_at)
    style.hidden = hidden if len(hidden) < len(ids) else frozenset()
    style.baseline = run_at.get(baseline, "")
    style.colours = {run_at[at]: f"#{colour}" for at, colour in _COLOUR.findall(colours) if at in run_at}
    for places, title in (each.split(":", 1) for each in some.split(",") if ":" in each):
        style.some = {**style.some, unquote(title): frozenset(run_at[at] for at in places.split("-") if at in run_at)}

"""Plotly figures of runs for the report, the notebook and the console: metric curves, and CPU and GPU usage."""

from __future__ import annotations

import colorsys
import html
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from cloudtrain.errors import BadRequest, install_command
from cloudtrain.history.curves import MOST
from cloudtrain.history.sampling import Point, split_lost
from cloudtrain.job.units import unix_time
from cloudtrain.report.sections import member

if TYPE_CHECKING:
    from cloudtrain.history.store import Store

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
ROW_PX = 260
LOST_OPACITY = 0.3
LARGE, SMALL = 6, 3  # powers of ten from which an axis has exponents: of large numbers, of those below 1
TOKENS = ("tokens", "num_tokens", "tokens_seen", "total_tokens", "num_input_tokens_seen")  # metrics that count them
TITLES = {"step": "step", "epoch": "epoch", "time": "time (s)", "tokens": "tokens"}
Over = Literal["step", "epoch", "time", "tokens"]


def curves(
    store: Store,
    run_ids: Sequence[str],
    names: Sequence[str] = (),
    *,
    over: Over = "step",
    rank: int | None = 0,
    smoothing: float = 0.0,
    log: bool = False,
    log_x: bool = False,
    most: int = MOST,
    bands: bool = True,
    labels: Mapping[str, str] | None = None,
    stored: Sequence[str] | None = None,
    together: str = "",
    colours: Mapping[str, str] | None = None,
) -> Any:
    """Return a plotly figure of some metrics, or of all: a picture for each, with a curve for every run.

    A long curve is drawn in 1,000 points, with the band that its values lie in. What an attempt did again after a resume is
    drawn faint. Raises BadRequest without plotly, or where there is nothing to draw.

    Args:
        store: The history.
        run_ids: The runs.
        names: The metrics, all without.
        over: The axis. Over time, every run begins at 0 s. Over epochs, points whose epoch is not known are left out; over
            tokens, runs without a metric that counts them (TOKENS).
        rank: Whose curves; None draws one for each rank.
        smoothing: Weight of the past (0 to 1) in a running mean, which is then drawn over the curve itself.
        log: Whether the values' axis is logarithmic; log_x: the other axis.
        most: Points of a curve.
        bands: Whether a long curve has the band that its values lie in.
        labels: Names of the runs, their ids without.
        stored: The metrics that there are, where the caller knows them.
        together: The title of one picture with the curves of all these metrics.
        colours: Colours of the runs, the usual ones without.
    """
    chosen = _choose(store, run_ids, names, rank, stored)
    figure = new_grid([escape_name(name) for name in ([together] if together else chosen)])
    owners = [(run_id, of) for run_id in run_ids for of in (store.curves.ranks(run_id) if rank is None else [rank])]
    for number, (run_id, of) in enumerate(owners):
        label = escape_name((labels or {}).get(run_id, run_id))
        group = label if rank is not None else f"{label} rank {of}" if len(run_ids) > 1 else f"rank {of}"
        along, placed = _axis(store, run_id, of, over)
        in_legend = len(owners) > 1
        for at, name in enumerate(chosen):
            points, lost = split_lost(_placed(store.curves.points(run_id, name, most, of), over) if placed else [])
            if not points and (rank is None or over in ("epoch", "tokens") or len(run_ids) > 1):
                continue
            place = {"row": 1, "col": 1} if together else {"row": at // 2 + 1, "col": at % 2 + 1}
            own = group if not together else member(name) if len(owners) == 1 else f"{group} · {member(name)}"
            colour = (colours or {}).get(run_id) or colour_of(at if together and len(owners) == 1 else number)
            curve = _Curve(points, lost, along, own, colour, {"legendgroup": group, **place})
            _draw_below(figure, curve, bands=bands, smoothing=smoothing)
            _draw_line(figure, curve, over, smoothing, {"showlegend": in_legend, "meta": run_id})
            in_legend = False
            _mark_not_finite(figure, curve)
    figure.update_yaxes(type="log" if log else None)
    figure.update_xaxes(type="log" if log_x else None, title_text=TITLES[over], title_standoff=4)
    return fit_axes(figure)


def _choose(
    store: Store, run_ids: Sequence[str], names: Sequence[str], rank: int | None, stored: Sequence[str] | None
) -> list[str]:
    """Return the metrics to draw, in their order; raises BadRequest where there is none."""
    if stored is None:
        stored = list(dict.fromkeys(row.name for run_id in run_ids for row in store.curves.summary(run_id, rank)))
    chosen = [name for name in stored if not names or name in names]
    if not chosen:
        wanted = ", ".join(names)
        raise BadRequest(
            f"there is no metric {wanted}" if wanted else "there are no metrics",
            f"the metrics are {', '.join(stored)}" if stored else "no metric has been reported yet",
        )
    return chosen


@dataclass(frozen=True)
class _Curve:
    """One curve of a figure: its points, their places on the axis, and how it is drawn."""

    points: Sequence[Point]
    lost: Sequence[Sequence[Point]]
    along: Callable[[Point], float]
    group: str
    colour: str
    at: Mapping[str, Any]  # row, column and group of the legend

    def across(self, points: Sequence[Point]) -> list[float]:
        """Return the places of points on the axis."""
        return [self.along(point) for point in points]


def _axis(store: Store, run_id: str, rank: int, over: Over) -> tuple[Callable[[Point], float], bool]:
    """Return the function that gives a point of a run its place on the axis, and whether it has one."""
    if over == "tokens":
        tokens = _tokens(store, run_id, rank)
        return (lambda point: _between(tokens, point.step)), bool(tokens)
    if over == "time":
        record = store.find(run_id)
        begin = _seconds(record.status.started_at or record.created_at)
        return (lambda point: _seconds(point.at) - begin), True
    return (lambda point: point.epoch or 0.0 if over == "epoch" else point.step), True


def _placed(points: Sequence[Point], over: Over) -> Sequence[Point]:
    """Return the points that have a place on the axis."""
    return [point for point in points if point.epoch is not None] if over == "epoch" else points


def _draw_below(figure: Any, curve: _Curve, *, bands: bool, smoothing: float) -> None:
    """Draw what is under a curve: lost parts, the band of its values, and the values themselves where it is smoothed."""
    points, across = curve.points, curve.across(curve.points)
    for part in curve.lost:
        figure.add_scatter(
            x=curve.across(part), y=[_drawn(point.value) for point in part], name=f"{curve.group}, lost",
            mode=mode_of(part), opacity=LOST_OPACITY, showlegend=False, line={"color": curve.colour, "width": 1},
            **curve.at,
        )  # fmt: skip
    if bands and any(point.points > 1 for point in points):
        band = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        place = {key: value for key, value in curve.at.items() if key != "legendgroup"}
        figure.add_scatter(x=across, y=[_drawn(point.highest) for point in points], **band, **place)
        figure.add_scatter(
            x=across, y=[_drawn(point.lowest) for point in points], fill="tonexty",
            fillcolor=_faint(curve.colour), **band, **place,
        )  # fmt: skip
    if smoothing:
        figure.add_scatter(
            x=across, y=[_drawn(point.value) for point in points], mode="lines", opacity=0.3, hoverinfo="skip",
            line={"color": curve.colour, "width": 1}, showlegend=False, **curve.at,
        )  # fmt: skip


def _draw_line(figure: Any, curve: _Curve, over: Over, smoothing: float, more: Mapping[str, Any]) -> None:
    """Draw the curve itself, or its running mean."""
    values = smooth([point.value for point in curve.points], smoothing)
    figure.add_scatter(
        x=curve.across(curve.points), y=[_drawn(value) for value in values], name=curve.group,
        mode=mode_of(curve.points), line={"color": curve.colour, "width": 1.5},
        hoverlabel={"bordercolor": curve.colour}, **_epochs(curve.points, over), **more, **curve.at,
    )  # fmt: skip


def _mark_not_finite(figure: Any, curve: _Curve) -> None:
    """Mark the places of a curve whose value is NaN or infinite, at the height of its lowest value."""
    if gone := [point for point in curve.points if not math.isfinite(point.value)]:
        floor = min((point.lowest for point in curve.points if math.isfinite(point.lowest)), default=1.0)
        figure.add_scatter(
            x=curve.across(gone), y=[floor] * len(gone), mode="markers", showlegend=False,
            marker={"symbol": "x", "size": 7, "color": curve.colour}, name=f"{curve.group}, not finite",
            hovertemplate="NaN or infinite", **curve.at,
        )  # fmt: skip


def fit_axes(figure: Any) -> Any:
    """Give each vertical axis a range around a curve that is one line, and numbers as people write them: 12,000, 5.2e-4.

    Without a range plotly draws a constant 1e-3 at 0, between -1 and 1.
    """
    values: dict[str, list[float]] = {}
    for trace in figure.data:
        values.setdefault(trace.yaxis or "y", []).extend(value for value in trace.y or () if value is not None)
    for name, of in values.items():
        lowest, highest = min(of, default=0.0), max(of, default=0.0)
        axis = figure.layout[f"yaxis{name[1:]}"]
        axis.minexponent = LARGE if max(abs(lowest), abs(highest)) >= 1 else SMALL
        if of and lowest == highest != 0 and axis.type != "log":
            axis.range = sorted((lowest / 2, lowest * 1.5))
    return figure


def colour_of(number: int) -> str:
    """Return the colour of the curve of a number: COLOURS first, then others that differ from their neighbours."""
    if number < len(COLOURS):
        return COLOURS[number]
    hue = number * 0.618033988749895 % 1.0  # the golden ratio spreads any count over the circle
    parts = colorsys.hls_to_rgb(hue, 0.36 + 0.08 * (number % 3), 0.65)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _tokens(store: Store, run_id: str, rank: int) -> list[tuple[int, float]]:
    """Return the steps at which a run has logged how many tokens it has seen, and how many; nothing where it has not."""
    names = [row.name for row in store.curves.summary(run_id, rank) if row.name.rpartition("/")[2] in TOKENS]
    points = store.curves.points(run_id, names[0], MOST, rank) if names else []
    return sorted((point.step, point.value) for point in points if math.isfinite(point.value) and not point.lost)


def _between(known: Sequence[tuple[int, float]], step: int) -> float:
    """Return the count at a step between two of which it is known, the nearest one outside of them."""
    at = bisect_left(known, (step, -math.inf))
    if at == 0 or at == len(known):
        return known[min(at, len(known) - 1)][1]
    (first, low), (last, high) = known[at - 1], known[at]
    return low + (high - low) * (step - first) / (last - first)


def _epochs(points: Sequence[Point], over: str) -> dict[str, Any]:
    """Return what shows the epoch of each point beside its value, where it is known."""
    if over == "epoch" or all(point.epoch is None for point in points):
        return {}
    told = ["" if point.epoch is None else f"epoch {point.epoch:g}" for point in points]
    return {"text": told, "hovertemplate": "%{y}  %{text}"}


def histogram(counts: Sequence[float], edges: Sequence[float]) -> Any:
    """Return a plotly figure of counts between edges, of which there is one more."""
    figure = new_grid([""])
    pairs = list(pairwise(edges))
    figure.add_bar(
        x=[(low + high) / 2 for low, high in pairs], width=[high - low for low, high in pairs], y=list(counts)
    )
    return figure


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Return the running mean of values in which the past counts `weight`; what is not finite stays, and counts nothing."""
    if not weight:
        return list(values)
    smoothed, mean, weights = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean = weight * mean + (1 - weight) * value
            weights = weight * weights + (1 - weight)  # below 1 at first: without it early values are drawn towards 0
            smoothed.append(mean / weights)
        else:
            smoothed.append(value)
    return smoothed


def new_grid(titles: Sequence[str]) -> Any:
    try:
        from plotly.subplots import make_subplots
    except ImportError:
        raise BadRequest(
            "figures need plotly, which is not installed", install_command("cloudtrain[console]")
        ) from None
    rows = math.ceil(len(titles) / 2)
    figure = make_subplots(
        rows=rows, cols=min(len(titles), 2), subplot_titles=list(titles), vertical_spacing=min(0.3, 0.25 / rows)
    )
    figure.update_layout(
        template="plotly_white", height=ROW_PX * rows + 60, margin={"l": 50, "r": 20, "t": 40, "b": 40},
        hovermode="x unified", hoverlabel={"namelength": -1},
    )  # fmt: skip
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(exponentformat="e", separatethousands=True, minexponent=LARGE)  # 5.2e-4, not 520µ
    return figure


def mode_of(points: Sequence[object]) -> str:
    """Return how a curve is drawn: few points need markers to be seen."""
    return "lines+markers" if len(points) < 3 else "lines"


def escape_name(name: str) -> str:
    """Return a name as plotly shows it: it takes tags of HTML in every text, and entities, but none for a quote."""
    return html.escape("".join(letter if letter.isprintable() else "?" for letter in name), quote=False)


def _seconds(at: str) -> float:
    return unix_time(at) if at else 0.0


def _drawn(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"

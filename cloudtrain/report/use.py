"""Plotly figures of what the nodes of runs used: processors, memory, GPUs, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.events import Gpu, Usage, read_usage
from cloudtrain.job.units import unix_time
from cloudtrain.report.plots import COLOURS, colour_of, escape_name, fit_axes, mode_of, new_grid

if TYPE_CHECKING:
    from cloudtrain.history.store import Store

MOST_POINTS = 200  # of a run's curve beside those of others
_FIELDS = (("cpu_percent", "processors (percent of one)", 1.0), ("rss_bytes", "memory (GB)", 1e-9))
_GPU_FIELDS = (("percent", "GPUs (percent)", 1.0), ("memory_bytes", "GPU memory (GB)", 1e-9))


def use(store: Store, run_id: str) -> Any:
    """Return a plotly figure of what the nodes used over time, None where nothing was reported; raises BadRequest without
    plotly."""
    panels = _use_panels(store, run_id)
    if not panels:
        return None
    figure = new_grid(list(panels))
    for number, traces in enumerate(panels.values()):
        for trace in traces:
            figure.add_scatter(**trace, showlegend=number == 0, row=number // 2 + 1, col=number % 2 + 1)
    return fit_axes(figure)


def use_panels(store: Store, run_id: str) -> dict[str, Any]:
    """Return the panels of `use` as a figure each, by their titles."""
    figures = {}
    for title, traces in _use_panels(store, run_id).items():
        figures[title] = new_grid([title])
        for trace in traces:
            figures[title].add_scatter(**trace)
        fit_axes(figures[title])
    return figures


def _use_panels(store: Store, run_id: str) -> dict[str, list[dict[str, Any]]]:
    """Return title -> curves of the nodes and of their GPUs."""
    events = [(event.node, event.at, read_usage(event.data)) for event in store.events(run_id, "usage")]
    events = [(node, at, usage) for node, at, usage in events if usage]
    panels: dict[str, list[dict[str, Any]]] = {}
    nodes = sorted({node for node, _, _ in events})
    for node in nodes:
        of_node = [(at, usage) for event_node, at, usage in events if event_node == node]
        look: dict[str, Any] = {"legendgroup": str(node), "line": {"color": COLOURS[node % len(COLOURS)], "width": 1.5}}
        for field, title, factor in _FIELDS:
            panels.setdefault(title, []).append(
                {"x": [at for at, _ in of_node], "y": [_scaled(usage, field, factor) for _, usage in of_node],
                 "name": f"node {node}", "mode": mode_of(of_node), **look}
            )  # fmt: skip
        for index in sorted({gpu.index for _, usage in of_node for gpu in usage.gpus}):
            seen = [(at, gpu) for at, usage in of_node for gpu in usage.gpus if gpu.index == index]
            if len(nodes) == 1:  # else a colour is a node
                look = {**look, "line": {**look["line"], "color": COLOURS[index % len(COLOURS)]}}
            for field, title, factor in _GPU_FIELDS:
                panels.setdefault(title, []).append(
                    {"x": [at for at, _ in seen], "y": [_scaled(gpu, field, factor) for _, gpu in seen],
                     "name": f"node {node}, GPU {index}", "mode": mode_of(seen), **look}
                )  # fmt: skip
    return panels


def use_of_runs(store: Store, run_ids: Sequence[str], labels: Mapping[str, str]) -> dict[str, Any]:
    """Return a figure for each panel with a curve for each run: the mean over its nodes and GPUs, by the run's own time."""
    figures: dict[str, Any] = {}
    for number, run_id in enumerate(run_ids):
        for title, (along, values) in _means(store, run_id).items():
            if title not in figures:
                figures[title] = new_grid([title])
                figures[title].update_xaxes(title_text="time (s)", title_standoff=4)
            colour = colour_of(number)
            figures[title].add_scatter(
                x=along, y=values, name=escape_name(labels.get(run_id, run_id)), mode=mode_of(along), showlegend=False,
                line={"color": colour, "width": 1.5}, hoverlabel={"bordercolor": colour},
            )  # fmt: skip
    return {title: fit_axes(figures[title]) for _, title, _ in (*_FIELDS, *_GPU_FIELDS) if title in figures}


def _means(store: Store, run_id: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return title -> times in seconds and means of a run, in at most MOST_POINTS spans of equal length."""
    told = [(unix_time(event.at), read_usage(event.data)) for event in store.events(run_id, "usage")]
    events = sorted(told, key=lambda each: each[0])
    if not events:
        return {}
    begin, span_s = events[0][0], max((events[-1][0] - events[0][0]) / MOST_POINTS, 1.0)
    found: dict[str, dict[int, list[float]]] = {}
    for at, usage in events:
        for fields, of in ((_FIELDS, (usage,)), (_GPU_FIELDS, usage.gpus)):
            for field, title, factor in fields:
                values = [value for each in of if (value := _scaled(each, field, factor)) is not None]
                if values:
                    found.setdefault(title, {}).setdefault(int((at - begin) / span_s), []).extend(values)
    return {
        title: ([round(span * span_s, 1) for span in spans], [sum(values) / len(values) for values in spans.values()])
        for title, spans in found.items()
    }


def _scaled(usage: Usage | Gpu, field: str, factor: float) -> float | None:
    value = getattr(usage, field)
    return None if value is None else value * factor

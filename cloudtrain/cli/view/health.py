"""Print what was measured on the nodes of a run before its ranks started (`cloudtrain show --health`)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.cli.view import terminal

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run

# Of a device, and of a node's links: the event's key -> the column.
DEVICE = {"tflops": "TFLOP/s", "memory": "memory GB/s", "host": "host GB/s"}
LINK = {"all": "all-reduce GB/s", "pair": "pair GB/s"}


def print_health(run: Run, as_json: bool) -> int:
    """Print the figures of the newest attempt whose nodes were checked. Return 1 when there are none."""
    events = run.store.events(run.run_id, "health")
    newest = events[-1].attempt if events else ""
    nodes = [(event.node, event.at, event.data) for event in events if event.attempt == newest]
    if as_json:
        terminal.print_json([{"attempt": newest, "node": node, "at": at, **data} for node, at, data in nodes], indent=2)
        return 0 if nodes else 1
    if not nodes:
        terminal.note(f"{run.run_id} has reported no health check; `health: strict` in the job asks for one")
        return 1
    rows = [row for node, _, data in nodes for row in _rows(node, data)]
    columns = [*DEVICE.values(), *LINK.values()]
    medians = {
        name: statistics.median(found) for name in columns if (found := [row[name] for row in rows if name in row])
    }
    head = ("node", "host", "device", *medians)
    cells = [[str(row.get(name, "")) for name in head] for row in rows]
    cells.append(["median", "", "", *(f"{value:.4g}" for value in medians.values())])
    terminal.print_table(head, cells, right=tuple(medians))
    for node, _, data in nodes:
        terminal.print_lines(*(f"node {node}: {text}" for text in _facts(data)))
    return 0


def _rows(node: int, data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each device of a node, whose links stand in the first one."""
    row: dict[str, Any] = {"node": node, "host": data.get("name", ""), **_numbers(data.get("link"), LINK)}
    for device in _list(data, "devices") or [{}]:
        yield row | {"device": device.get("name", "")} | _numbers(device, DEVICE)
        row = {"node": node, "host": ""}


def _facts(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a node has reported beside figures: faults, and what nvidia-smi says of each GPU."""
    for fault in data.get("faults") or ():
        yield str(fault[-1] if isinstance(fault, list) else fault)
    for gpu in _list(data, "gpus"):
        yield ", ".join(f"{name} {value}" for name, value in gpu.items() if value not in ("", None))
    yield ", ".join(f"{name} {data[name]}" for name in ("cpus", "shm", "free", "torch", "seconds") if name in data)


def _list(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = data.get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _numbers(data: object, names: Mapping[str, str]) -> dict[str, float]:
    found = data if isinstance(data, dict) else {}
    return {shown: found[name] for name, shown in names.items() if isinstance(found.get(name), int | float)}

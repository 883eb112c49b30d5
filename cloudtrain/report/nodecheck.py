"""What was measured on the nodes of a run before its ranks started, as a table with medians, and what was found."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.events import UNFIT

if TYPE_CHECKING:
    from cloudtrain.events import Event
    from cloudtrain.history.store import Store

# Of a device, and of a node's links: the event's key -> the column.
DEVICE = {"tflops": "TFLOP/s", "memory": "memory GB/s", "host": "host GB/s", "peer": "GPU to GPU GB/s"}
LINK = {"all": "all-reduce GB/s", "pair": "pair GB/s"}
_FINDINGS = ("health check: ", "straggler: ")  # how the launcher's sentences on nodes begin


class NodeCheck(NamedTuple):
    """The check of the newest attempt whose nodes were checked. All texts are as the job printed them.

    Attributes:
        events: of the kind `health`, one for each node.
        head: names of the columns.
        rows: one for each device, with its node's links in the first one; the last one has the medians.
        facts: one sentence for each node and what it has reported beside figures.
        verdict: what was found on nodes, while they ran too; empty where all is well.
    """

    events: list[Event]
    head: list[str]
    rows: list[list[str]]
    facts: list[str]
    verdict: list[str]


def node_check(store: Store, run_id: str) -> NodeCheck | None:
    """Return what was measured on a run's nodes, None where no check was reported."""
    every = store.events(run_id, "health")
    events = [event for event in every if event.attempt == every[-1].attempt]
    if not events:
        return None
    rows = [row for event in events for row in _rows(event.node, event.data)]
    columns = [*DEVICE.values(), *LINK.values()]
    medians = {
        name: statistics.median(found) for name in columns if (found := [row[name] for row in rows if name in row])
    }
    head = ["node", "host", "device", *medians]
    cells = [[str(row.get(name, "")) for name in head] for row in rows]
    cells.append(["median", "", "", *(f"{value:.4g}" for value in medians.values())])
    facts = [f"node {event.node}: {text}" for event in events for text in _facts(event.data)]
    return NodeCheck(events, head, cells, facts, list(_verdict(store, run_id, events[-1].attempt)))


def _verdict(store: Store, run_id: str, attempt: str) -> Iterator[str]:
    """Yield the launcher's sentences on nodes that are broken or slow, each once."""
    events = [event for kind in ("alarm", "result") for event in store.events(run_id, kind) if event.attempt == attempt]
    for reason in dict.fromkeys(str(event.data.get("reason") or "") for event in events):
        if reason.startswith(_FINDINGS) or UNFIT in reason:
            yield reason


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
    yield ", ".join(
        f"{name} {data[name]}" for name in ("cpus", "shm", "free", "torch", "cuda", "seconds") if name in data
    )


def _list(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = data.get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _numbers(data: object, names: Mapping[str, str]) -> dict[str, float]:
    found = data if isinstance(data, dict) else {}
    return {shown: found[name] for name, shown in names.items() if isinstance(found.get(name), int | float)}

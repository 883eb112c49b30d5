"""What a training over nodes returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run


class TrainingResult(TypedDict):
    """The result of `train_distributed`, a dictionary; its docstring has the keys."""

    model: Any
    model_name: str
    nodes_used: int
    world_size: int
    device: str
    final_loss: float
    run_id: str
    synthetic: bool
    status: str


def read_world(run: Run) -> tuple[int, int, str]:
    """Return on how many nodes, in how many processes and on which device a run was trained, as its nodes said."""
    newest = run.attempts[-1].attempt_id
    events = [event for event in run.store.events(run.run_id, "world") if event.attempt == newest]
    supervisors = {event.node: event.data for event in events if "pid" in event.data}
    [ranks] = [event.data for event in events if "device" in event.data]
    return len(supervisors), ranks["world_size"], ranks["device"]

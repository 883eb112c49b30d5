"""What a training over nodes returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run


class World(TypedDict):
    """Where a run really was trained."""

    nodes_used: int
    world_size: int
    device: str


class TrainingResult(World):
    """The result of `train_distributed`, a dictionary; its docstring has the keys."""

    model: Any
    model_name: str
    final_loss: float
    run_id: str
    synthetic: bool
    status: str


def read_world(run: Run) -> World:
    """Return where the run really was trained, as its launchers and its rank 0 said."""
    newest = run.attempts[-1].attempt_id
    events = [event for event in run.store.events(run.run_id, "world") if event.attempt == newest]
    supervisors = {event.node: event.data for event in events if "pid" in event.data}
    [ranks] = [event.data for event in events if "device" in event.data]
    return {"nodes_used": len(supervisors), "world_size": ranks["world_size"], "device": ranks["device"]}

"""Plan an upload of the run's folders: two listings in, an ordered list of actions out; no I/O.

The order holds an invariant at every point at which the node may be lost: the files below a COMPLETE in the store are
all there, as they were when it was written.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Collection, Mapping

from .script_files import checkpoint_of, is_whole

MARKER = "COMPLETE"
CHECKPOINTS = "checkpoints/"  # names below it are removed from the store when they are removed here
# Kinds of actions, in the order in which they are done.
WITHDRAW = "withdraw"  # delete a mark in the store before files below it change
UPLOAD = "upload"  # upload a file
COMPLETE = "complete"  # upload a mark, where the store has all that it covers and names by then
RETIRE = (
    "retire"  # delete the mark of a checkpoint that was removed here, where newer ones are whole in the store by then
)
REMOVE = "remove"  # delete a file that was removed here, unless a mark in the store stands over it still

Action = namedtuple("Action", "kind name")
Action.__doc__ = "One step of an upload: one of the kinds above, and the name of an object."


def plan_upload(
    stored: Mapping[str, object],
    listed: Mapping[str, object],
    withdrawn: Collection[str] = (),
    removed: Collection[str] = (),
) -> list[Action]:
    """Return what brings the store up to date.

    `stored` is name -> state of what the store has from here, `listed` of what is here: None for a file that has gone
    since it was listed, which is no change to it. `withdrawn` are marks that were listed and have gone since: who
    removes a checkpoint begins with its mark. `removed` are files outside of the checkpoints that are to go.
    """
    changed = {name for name, state in listed.items() if state and stored.get(name) != state}
    gone = {name for name in stored if name.startswith(CHECKPOINTS) and name not in listed}
    gone |= {name for name in (*withdrawn, *removed) if name in stored}
    here = [name for name in listed if name not in withdrawn]
    marks = [name for name in stored if is_mark(name)]
    broken = {name for name in marks if covers_any(name, changed) or (name in here and covers_any(name, gone))}
    complete = [name for name in here if is_mark(name) and (name in changed or name in broken)]
    return [
        *(Action(WITHDRAW, name) for name in marks if name in broken),
        *(Action(UPLOAD, name) for name in _in_order(changed, listed) if not is_mark(name)),
        # The deepest first: a mark covers those below its folder.
        *(Action(COMPLETE, name) for name in sorted(complete, key=lambda name: -name.count("/"))),
        *(Action(RETIRE, name) for name in marks if name in gone and name not in broken),
        *(Action(REMOVE, name) for name in sorted(gone) if not is_mark(name)),
    ]


def _in_order(changed: Collection[str], listed: Mapping[str, object]) -> list[str]:
    """Return names in the order in which they are uploaded: whole checkpoints first, the newest before the others.

    A platform may end the node while they are on their way.
    """
    units: dict[str, list[str]] = {}
    for name in listed:
        if unit := checkpoint_of(name):
            units.setdefault(unit, []).append(name)
    newest = {
        unit: max(_time_of(listed[name]) for name in names)
        for unit, names in units.items()
        if is_whole(unit, names, listed) is not False
    }
    return sorted(changed, key=lambda name: (-newest.get(checkpoint_of(name), 0), name))


def _time_of(state: object) -> int:
    return int(state[1]) if isinstance(state, tuple) else 0


def left_to_node_0(actions: list[Action]) -> tuple[list[Action], list[str]]:
    """Return the actions without those that complete or remove checkpoints, and the names that are removed here."""
    ours = [action for action in actions if action.kind == UPLOAD or not action.name.startswith(CHECKPOINTS)]
    return ours, [action.name for action in actions if action not in ours and action.kind in (RETIRE, REMOVE)]


def is_mark(name: str) -> bool:
    """Return whether an object says that all in and below its folder is complete."""
    return name.rpartition("/")[2] == MARKER


def covers(mark: str, name: str) -> bool:
    """Return whether an object lies in or below a mark's folder."""
    return name.startswith(mark[: -len(MARKER)])


def covers_any(mark: str, names: Collection[str]) -> bool:
    return any(covers(mark, name) for name in names if name != mark)

"""What an upload does, from two listings alone: nothing is ever removed from under a COMPLETE, and at the end all is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher.output import upload_plan as plan
from launcher.output.listing import list_files

OLD, NEW = "checkpoints/step-1", "checkpoints/step-2"
WHOLE = {f"{OLD}/part": 1, f"{OLD}/COMPLETE": 1}
CASES = {
    "nothing changed": (WHOLE, WHOLE, (), []),
    "a new checkpoint": (
        {},
        WHOLE,
        (),
        [(plan.UPLOAD, f"{OLD}/part"), (plan.COMPLETE, f"{OLD}/COMPLETE")],
    ),
    "a file that changes": (
        WHOLE,
        {**WHOLE, f"{OLD}/part": 2},
        (),
        [(plan.WITHDRAW, f"{OLD}/COMPLETE"), (plan.UPLOAD, f"{OLD}/part"), (plan.COMPLETE, f"{OLD}/COMPLETE")],
    ),
    "a mark that changes": (WHOLE, {**WHOLE, f"{OLD}/COMPLETE": 2}, (), [(plan.COMPLETE, f"{OLD}/COMPLETE")]),
    "a file gone from under a mark": (
        WHOLE,
        {f"{OLD}/COMPLETE": 1},
        (),
        [(plan.WITHDRAW, f"{OLD}/COMPLETE"), (plan.COMPLETE, f"{OLD}/COMPLETE"), (plan.REMOVE, f"{OLD}/part")],
    ),
    "a checkpoint replaced by the next": (
        WHOLE,
        {f"{NEW}/part": 1, f"{NEW}/COMPLETE": 1},
        (),
        [
            (plan.UPLOAD, f"{NEW}/part"),
            (plan.COMPLETE, f"{NEW}/COMPLETE"),
            (plan.RETIRE, f"{OLD}/COMPLETE"),
            (plan.REMOVE, f"{OLD}/part"),
        ],
    ),
    "a mark withdrawn while states were read": (
        WHOLE,
        {f"{OLD}/part": None, f"{OLD}/COMPLETE": 1},
        (f"{OLD}/COMPLETE",),
        [(plan.RETIRE, f"{OLD}/COMPLETE")],
    ),
    "a file gone since it was listed": (WHOLE, {f"{OLD}/part": None, f"{OLD}/COMPLETE": 1}, (), []),
    "outputs stay": ({"outputs/a": 1, "model/b": 1}, {}, (), []),
    "marks below marks, the deepest first": (
        {},
        {"outputs/COMPLETE": 1, "outputs/a/COMPLETE": 1, "outputs/a/b": 1},
        (),
        [(plan.UPLOAD, "outputs/a/b"), (plan.COMPLETE, "outputs/a/COMPLETE"), (plan.COMPLETE, "outputs/COMPLETE")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_done_in_which_order(case: str):
    stored, listed, withdrawn, expected = CASES[case]
    assert plan.plan_upload(stored, listed, withdrawn) == [plan.Action(*one) for one in expected]


FOLDERS = ["checkpoints/", "checkpoints/a/", "checkpoints/a/deep/", "checkpoints/b/", "outputs/", "outputs/c/"]
NAMES = st.sampled_from([folder + name for folder in FOLDERS for name in ("COMPLETE", "x", "y")])
LISTINGS = st.dictionaries(NAMES, st.integers(1, 2))


def do(action: plan.Action, store: dict, here: dict) -> None:
    if action.kind in (plan.UPLOAD, plan.COMPLETE):
        store[action.name] = here[action.name]
    else:
        store.pop(action.name, None)


@settings(max_examples=500, deadline=None)
@given(LISTINGS, LISTINGS)
def test_no_mark_stands_over_what_is_changed_or_removed(stored: dict, here: dict):
    """Wherever the node dies, a mark in the store covers what it covered when it came there."""
    actions = plan.plan_upload(stored, here)
    store, covered = dict(stored), {mark: dict(stored) for mark in stored if plan.is_mark(mark)}
    for action in actions:
        do(action, store, here)
        if action.kind == plan.COMPLETE:
            covered[action.name] = here
        for mark in filter(plan.is_mark, store):
            for name, state in covered[mark].items():
                if plan.covers(mark, name) and not plan.is_mark(name):
                    assert store.get(name) == state, (action, mark, name)


@settings(max_examples=500, deadline=None)
@given(LISTINGS, LISTINGS)
def test_at_the_end_the_store_has_what_is_here(stored: dict, here: dict):
    store = dict(stored)
    for action in plan.plan_upload(stored, here):
        do(action, store, here)
    others = {name: state for name, state in store.items() if name not in here}
    assert store == {**others, **here}
    assert others.items() <= stored.items() and not [name for name in others if name.startswith("checkpoints/")]
    assert not [
        name for name in stored.keys() - store.keys() if not name.startswith("checkpoints/") and not plan.is_mark(name)
    ]
    assert plan.plan_upload(store, here) == []


@settings(max_examples=500, deadline=None)
@given(LISTINGS, st.dictionaries(NAMES, st.sampled_from([1, 2, None])), st.sets(NAMES.filter(plan.is_mark)))
def test_every_action_has_its_place(stored: dict, listed: dict, marks: set):
    """Whatever vanishes while it is looked at: kinds in their order, none twice, nothing that is not here is uploaded."""
    withdrawn = marks & listed.keys()
    actions = plan.plan_upload(stored, listed, withdrawn)
    kinds = [plan.WITHDRAW, plan.UPLOAD, plan.COMPLETE, plan.RETIRE, plan.REMOVE]
    places = [kinds.index(action.kind) for action in actions]
    assert places == sorted(places) and len(set(actions)) == len(actions)
    for action in actions:
        assert plan.is_mark(action.name) == (action.kind in (plan.WITHDRAW, plan.COMPLETE, plan.RETIRE))
        if action.kind in (plan.UPLOAD, plan.COMPLETE):
            assert action.name in listed and action.name not in withdrawn
        else:
            assert action.name in stored
        if action.kind in (plan.RETIRE, plan.REMOVE):
            assert action.name not in listed or action.name in withdrawn


def test_whole_checkpoints_go_first_and_the_newest_before_the_others():
    """The node may end before all are there."""
    states = {
        "outputs/a.log": (9, 90),
        "outputs/out/checkpoint-2/trainer_state.json": (1, 20),
        "outputs/out/checkpoint-4/model": (5, 39),
        "outputs/out/checkpoint-4/trainer_state.json": (1, 40),
        "outputs/out/checkpoint-6/optimizer.pt": (5, 60),  # the Trainer still writes it
    }
    names = [action.name.rpartition("out/")[2] for action in plan.plan_upload({}, states)]
    assert names == [
        "checkpoint-4/model", "checkpoint-4/trainer_state.json", "checkpoint-2/trainer_state.json", "outputs/a.log",
        "checkpoint-6/optimizer.pt",
    ]  # fmt: skip


def test_a_checkpoint_below_the_name_of_one_that_is_being_written_stays_here(tmp_path: Path):
    for name in (".cloudtrain-part-1/checkpoint-2/model", "checkpoint-1/model", "checkpoint-1/.cloudtrain-part-x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [*list_files({"checkpoints": str(tmp_path)})] == ["checkpoints/checkpoint-1/model"]

"""A look at one run and the call that asks for many states take turns where a platform may be asked seldom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.events import State, Status
from cloudtrain.runs.watching.groups import Entry, Group, ProcessorShare
from cloudtrain.runs.watching.watch import Pace
from cloudtrain.testing.clock import VirtualClock


class Platform(LocalBackend):
    """It says the states of many runs in one call, and may be asked twenty times a second."""

    group, calls_per_s = "one", 20.0

    def statuses(self, handles: Sequence[str]) -> Mapping[str, Status]:
        return {handle: Status(State.RUNNING) for handle in handles}


def test_a_run_without_a_handle_is_looked_at_beside_one_whose_state_is_always_due(tmp_path):
    clock = VirtualClock()
    platform = Platform({}, tmp_path)
    group = Group("one", platform, ProcessorShare(clock), clock)
    accepted, unanswered = Entry("accepted", None, clock), Entry("unanswered", None, clock)
    for entry in (accepted, unanswered):
        entry.group, entry.leased, entry.pace = group, True, Pace(platform, lambda: False, clock=clock)
    accepted.handle, accepted.seen = "a", Status(State.RUNNING)
    turns = []
    for _ in range(80):
        for entry in (accepted, unanswered):
            if entry.queued or entry.due > clock.monotonic():
                continue
            group.schedule(entry, 0.0)
        if known := group.take_known():
            group.budget.take(1)
            turns += [entry.run_id for entry in known]
        while entry := group.take_waiting():
            turns.append(entry.run_id)
        clock.sleep(0.02)
    assert len(turns) >= 10
    late = turns[len(turns) // 2 :]  # after the calls that are free at first
    assert {"accepted", "unanswered"} <= set(late), turns

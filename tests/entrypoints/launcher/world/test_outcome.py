"""What node 0 decides for all, moment by moment; no process, no socket."""

from __future__ import annotations

import pytest
from launcher.manifest import Manifest as Received
from launcher.world.outcome import (
    LEFT_S,
    SETTLE_S,
    SIGNAL_S,
    ClusterState,
    Outcome,
    Restart,
    Start,
    container_code,
    launcher_code,
    missing_outcome,
)

from cloudtrain.backends.manifest import Manifest


def gang(nodes: int = 2, join_s: float = 10, started: bool = True, **manifest) -> ClusterState:
    orders = Received(
        Manifest(run_id="r", attempt=1, argv=("t.py",), nodes=nodes, processes_per_node=1, **manifest).to_dict()
    )
    made = ClusterState(orders, join_s, join_s)
    if started:
        for node in range(nodes):
            assert made.join(node, f"host{node}", 1) is None
            made.ready(node)
        assert made.decide(0.0) == Start(tuple(range(nodes)))
    return made


def test_all_start_when_all_are_ready():
    made = gang(started=False)
    made.join(0, "a", 1)
    made.ready(0)
    assert made.decide(0) is None
    made.join(1, "b", 1)
    assert made.decide(1) is None
    made.ready(1)
    assert made.decide(2) == Start((0, 1))
    assert made.decide(3) is None


def test_who_does_not_belong_is_told_why():
    made = gang(started=False)
    assert made.join(0, "a", 1) is None
    assert made.join(0, "b", 1) == "node rank 0 is already used by a"
    assert made.join(2, "b", 1) == "node rank 2 is not one of 2 nodes"
    assert made.join(1, "b", 4) == "node 1 would start 4 processes, not 1"
    assert gang().join(1, "b", 1) == "the attempt has started without it"


def test_fewer_nodes_begin_only_where_min_nodes_allows_and_time_is_over():
    made = gang(nodes=4, min_nodes=2, started=False)
    for node in (0, 3):
        made.join(node, "h", 1)
        made.ready(node)
    assert made.decide(9.9) is None
    assert made.decide(10) == Start((0, 3))
    made = gang(nodes=4, min_nodes=3, started=False)
    for node in (0, 3):
        made.join(node, "h", 1)
        made.ready(node)
    assert made.decide(10) == missing_outcome("2 of 4 nodes joined within 10 s (min_nodes is 3); missing: 1, 2")


def test_the_time_counts_from_the_node_that_came_first():
    made = gang(started=False)
    made.join(0, "a", 1)
    assert made.decide(7) is None and made.missing == [1]
    made.join_by(7)
    made.join_by(9)
    assert made.decide(7) == missing_outcome("1 of 2 nodes joined within 10 s; missing: 1")


def test_who_has_joined_may_prepare_for_longer_than_the_others_may_take_to_join():
    made = gang(started=False)
    made.join(0, "a", 1)
    made.join(1, "b", 1)
    made.ready(0)
    assert made.decide(1e6) is None
    made.ready(1)
    assert made.decide(1e6) == Start((0, 1))


def test_all_well_ended_is_success():
    made = gang()
    made.end(0)
    assert made.decide(1) is None
    made.end(1)
    assert made.decide(2) == Outcome("SUCCEEDED", 0, "script")


def test_the_earlier_failure_counts_whatever_is_heard_first():
    made = gang()
    made.fail(0, 0, 1, at=100.2, reason="rank 0 exited with code 1")
    assert made.decide(1.0) is None
    made.fail(1, 1, 7, at=100.1, reason="rank 1 exited with code 7")
    made.end(0)
    assert made.decide(1.0 + SETTLE_S) == Outcome("FAILED", 7, "script", 1, "node 1: rank 1 exited with code 7")
    assert made.decide(9) is None


def test_clocks_that_differ_are_brought_together():
    made = gang()
    made.record_clock(1, at=5000.0, now=100.0)  # node 1's clock is 4900 s ahead
    made.fail(1, 1, 7, at=5000.1, reason="r")
    made.fail(0, 0, 1, at=100.2, reason="r")
    made.decide(1)
    assert made.decide(2).failed_rank == 1


def test_a_clock_that_is_nearly_right_is_left_alone():
    made = gang()
    made.record_clock(1, at=99.5, now=100.0)
    made.fail(1, 1, 7, at=100.1, reason="r")
    made.fail(0, 0, 1, at=100.2, reason="r")
    made.decide(1)
    assert made.decide(2).failed_rank == 1


def test_a_single_node_does_not_wait_for_others_failures():
    made = gang(nodes=1)
    made.fail(0, 0, 3, 1.0, "rank 0 exited with code 3")
    assert made.decide(1.0) == Outcome("FAILED", 3, "script", 0, "rank 0 exited with code 3")


def test_a_lost_node_ends_the_attempt_unless_a_failure_explains_it():
    made = gang()
    made.lose(1, "the connection was closed")
    assert made.decide(1.0) is None
    outcome = made.decide(2.0)
    assert outcome == Outcome("LOST", None, "launcher", None, "node 1 (host1) was lost: the connection was closed")
    assert launcher_code(outcome) == 69
    made = gang()
    made.fail(1, 1, 5, 1.0, "r")  # its rank broke, then the machine
    made.lose(1, "x")
    made.decide(1.0)
    assert made.decide(2.0).exit_code == 5
    for lost_first in (True, False):  # a rank breaks because its peer's machine vanished, and is often heard of first
        made = gang()
        if lost_first:
            made.lose(1, "x")
        made.fail(0, 0, 1, 1.0, "connection reset by peer")
        assert made.decide(1.0) is None
        made.lose(1, "x")
        assert made.decide(2.0).state == "LOST"


def test_a_request_ends_it_when_all_have_left():
    for state, reason in (
        ("PREEMPTED", "stopped by SIGTERM"),
        ("CANCELLED", "cancelled"),
        ("TIMED_OUT", "max_runtime (86400 s) was over"),
    ):
        made = gang()
        made.stop(state, at=50.0)
        made.fail(1, 1, 1, at=50.1, reason="r")  # what ranks exit with after a request is no failure
        made.end(1)
        assert made.decide(1) is None
        made.end(0)
        assert made.decide(2) == Outcome(state, 75, "launcher", None, reason)


def test_a_failure_before_the_request_stays_one():
    made = gang()
    made.stop("PREEMPTED", at=50.0)
    made.fail(1, 1, 9, at=49.9, reason="r")
    made.decide(1)
    assert made.decide(2).exit_code == 9


def test_a_machine_that_goes_after_the_request_has_left():
    made = gang()
    made.stop("PREEMPTED", at=1.0)
    made.lose(1, "gone")
    made.end(0)
    assert made.decide(1).state == "PREEMPTED"


def test_a_persons_word_outweighs_a_machines():
    made = gang()
    made.stop("PREEMPTED", 1.0)
    made.stop("CANCELLED", 2.0)
    assert made.stopping == "CANCELLED"
    made = gang()
    made.stop("TIMED_OUT", 1.0)
    made.stop("PREEMPTED", 2.0)
    assert made.stopping == "TIMED_OUT"


def test_a_rank_that_dies_of_the_request_itself_has_not_failed():
    made = gang(nodes=1)
    made.fail(0, 0, 143, 1.0, "r")
    made.end(0)
    assert made.decide(1.0) is None
    made.stop("PREEMPTED", 1.1)
    assert made.decide(1.2).state == "PREEMPTED"
    made = gang(nodes=1)
    made.fail(0, 0, 143, 1.0, "r")
    made.end(0)
    assert made.decide(1.0) is None
    assert made.decide(1.0 + SIGNAL_S).exit_code == 143


@pytest.mark.parametrize("started", [False, True])
def test_a_refusal_ends_all(started: bool):
    made = gang(started=started)
    if not started:
        made.join(0, "a", 1)
        made.join(1, "b", 1)
    made.refuse(1, "no script")
    assert made.decide(1) == Outcome("FAILED", 78, "launcher", None, "node 1: no script")


def test_a_request_before_the_start_needs_nobodys_answer():
    made = gang(started=False)
    made.join(0, "a", 1)
    made.stop("CANCELLED", 1.0)
    assert made.decide(1) == Outcome("CANCELLED", 75, "launcher", None, "cancelled before the ranks started")


@pytest.mark.parametrize(
    ("state", "code", "kubernetes", "vertex"),
    [
        ("SUCCEEDED", 0, 0, 0),
        ("PREEMPTED", 75, 75, 134),
        ("LOST", None, 69, 69),
        ("TIMED_OUT", 75, 1, 75),
        ("CANCELLED", 75, 1, 75),
        ("FAILED", 75, 1, 75),  # the script's own
        ("FAILED", 69, 1, 69),
        ("FAILED", 3, 3, 3),
    ],
)
def test_a_platform_that_starts_again_by_the_exit_code_does_so_for_what_may_be_tried_again(
    state, code, kubernetes, vertex
):
    outcome = Outcome(state, code)
    assert [container_code(outcome, name) for name in ("kubernetes", "vertex")] == [kubernetes, vertex]
    assert container_code(outcome, "local") == launcher_code(outcome)


def test_ranks_that_left_early_are_named_once_and_stand_in_the_reason():
    made = gang(nodes=3)
    assert made.left_early(LEFT_S * 9) == ""  # nobody has left
    made.leave(2, 100.0)
    assert made.left_early(100.0 + LEFT_S - 1) == ""
    made.leave(1, 120.0)
    assert made.left_early(100.0 + LEFT_S) == "ranks 1 and 2 have ended with 0, rank 0 still runs"
    assert made.left_early(100.0 + LEFT_S * 2) == ""
    made.fail(0, 0, 1, at=100.0, reason="rank 0 exited with code 1")
    made.leave(0, 190.0)  # what came after the failure is no cause of it
    made.decide(200.0)
    assert made.decide(200.0 + SETTLE_S).reason == "node 0: rank 0 exited with code 1; ranks 1 and 2 had ended with 0"


def test_who_leaves_on_request_or_with_all_others_has_not_left_early():
    made = gang()
    made.leave(1, 0.0)
    made.stop("CANCELLED", 1.0)
    assert made.left_early(LEFT_S * 2) == ""
    made = gang()
    made.leave(0, 0.0)
    made.leave(1, 0.0)
    assert made.left_early(LEFT_S * 2) == ""


def test_ranks_start_again_when_every_node_is_ready_again():
    made = gang(restarts=1)
    made.fail(1, 1, 139, 5.0, "died", True)
    assert made.decide(5.0) is None
    assert made.decide(5.0 + SETTLE_S) == Restart(1, "node 1: died")
    made.fail(0, 0, 1, 5.5, "lost its peer")  # of the world that has ended
    made.ready(1)
    assert made.decide(7.0) is None and made.missing == []
    made.ready(0)
    assert made.decide(7.0) == Start((0, 1))
    made.end(0)
    made.end(1)
    assert made.decide(9.0) == Outcome("SUCCEEDED", 0, "script")


@pytest.mark.parametrize("passes", [True, False])
def test_the_last_failure_ends_the_attempt(passes: bool):
    """With the first cause, or with its own where no restart could help."""
    made = gang(nodes=1, restarts=1)
    made.fail(0, 0, 139, 5.0, "died", True)
    assert made.decide(5.0) == Restart(1, "died")
    made.ready(0)
    assert made.decide(5.0) == Start((0,))
    made.fail(0, 0, 1, 6.0, "raised", passes)
    both = Outcome("FAILED", 139, "script", 0, "died; after 1 restart it ended with: raised")
    assert made.decide(6.0) == (both if passes else Outcome("FAILED", 1, "script", 0, "raised"))


def test_a_failure_that_comes_first_and_cannot_pass_is_not_restarted():
    made = gang(restarts=1)
    made.fail(0, 0, 1, 5.2, "lost its peer", True)
    made.fail(1, 1, 1, 5.0, "raised")
    made.decide(5.2)
    assert made.decide(5.2 + SETTLE_S) == Outcome("FAILED", 1, "script", 1, "node 1: raised")


@pytest.mark.parametrize("ends", ["stop", "lose"])
def test_between_two_starts_a_stop_or_a_lost_node_ends_the_attempt(ends: str):
    made = gang(restarts=1)
    made.fail(1, 1, 139, 5.0, "died", True)
    made.decide(5.0)
    assert isinstance(made.decide(5.0 + SETTLE_S), Restart)
    if ends == "stop":
        made.stop("TIMED_OUT", 7.0)
        reason = "max_runtime (86400 s) was over"
    else:
        made.lose(1, "silence")
        reason = "node 1 (host1) was lost: silence"
    decision = made.decide(7.0)
    assert (decision.state, decision.reason) == ("TIMED_OUT" if ends == "stop" else "LOST", reason)

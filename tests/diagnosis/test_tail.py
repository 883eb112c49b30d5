"""The last lines of a log: what a platform printed counts for the start that it belongs to."""

from __future__ import annotations

from cloudtrain.diagnosis.tail import Tail
from cloudtrain.events import MARK, PLATFORM, LogLine


def test_a_platforms_lines_of_an_earlier_start_are_not_kept() -> None:
    """A job that was preempted and requeued fails later: the notice of the preemption is not why."""

    def line(node: int, text: str) -> LogLine:
        return LogLine("2026-11-23T12:00:00.000000Z", node, -1, 0, text, "")

    notice, tail = "slurmstepd: error: *** STEP 7.0 ON node-2 CANCELLED AT 12:00 DUE TO PREEMPTION ***", Tail()
    for each in (line(PLATFORM, notice), line(0, MARK + '{"kind":"state","state":"STARTING"}'), line(0, "preparing")):
        tail.add(each)
    tail.add(line(PLATFORM, "srun: error: node-2: task 0: Killed"))
    assert [(kept.node, kept.text) for kept in tail.lines()] == [
        (0, "preparing"),
        (PLATFORM, "srun: error: node-2: task 0: Killed"),
    ]

"""Lines that CloudWatch shows late, twice or never."""

from __future__ import annotations

from cloudtrain.backends.sagemaker import logs
from cloudtrain.events import State
from tests.backends.sagemaker.test_backend import simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_faults import Bench, bench  # noqa: F401 - a fixture

COUNT = "for n in range(60): print('line', n, flush=True)\n"


def test_late_lines_are_waited_for_when_the_job_is_over(bench: Bench) -> None:  # noqa: F811
    bench.simulator.behavior.logs_late_s = 3.0
    handle = bench.backend.submit(*bench.plan(COUNT))
    assert bench.final(handle).state is State.SUCCEEDED
    assert bench.log_texts(handle) == [f"line {n}" for n in range(60)]


def test_doubled_lines_and_small_pages(bench: Bench) -> None:  # noqa: F811
    bench.simulator.behavior.logs_twice = True
    bench.simulator.page = 7
    handle = bench.backend.submit(*bench.plan(COUNT, num_nodes=2))
    assert bench.final(handle).state is State.SUCCEEDED
    lines = list(bench.backend.logs(handle))
    for node in (0, 1):
        assert [line.seq for line in lines if line.node == node] == list(range(sum(x.node == node for x in lines)))
        assert [line.text for line in lines if (line.node, line.rank) == (node, node)] == [
            f"line {n}" for n in range(60)
        ]
    for cut in (0, 33, len(lines) - 1):
        assert list(bench.backend.logs(handle, after=lines[cut].cursor)) == lines[cut + 1 :]


class Recorded:
    """CloudWatch as it may answer: one stream, and the events of each look at it."""

    def __init__(self, *looks: list[tuple[int, str]]) -> None:
        self.looks = list(looks)

    def call(self, service: str, operation: str, **values):
        if operation == "describe_log_streams":
            return {"logStreams": [{"logStreamName": "job/algo-1-1"}]}
        since = [{"timestamp": at, "message": text} for at, text in self.looks[0] if at >= values["startTime"]]
        return {"events": [] if "nextToken" in values else since, "nextForwardToken": "same"}


def ours(seq: int) -> str:
    return f"{seq} 0 2026-11-21T00:00:00.000000Z text {seq}"


def looked(recorded: Recorded, positions: list, over: bool = False) -> list[str]:
    return [line.text for line in logs.read_lines(recorded, "job", positions, over=over)]  # type: ignore[arg-type]


def test_a_line_that_comes_late_is_neither_lost_nor_out_of_order() -> None:
    positions = logs.parse_cursor(None, 1)
    recorded = Recorded([(100, ours(0)), (101, ours(1)), (103, ours(3))])
    assert looked(recorded, positions) == ["text 0", "text 1"]
    recorded.looks = [[(100, ours(0)), (101, ours(1)), (102, ours(2)), (103, ours(3))]]
    assert looked(recorded, positions) == ["text 2", "text 3"]
    assert looked(recorded, positions) == []


def test_a_line_that_never_comes_does_not_hold_up_the_others_for_ever() -> None:
    late = 100 + logs.GAP_MS
    looks = [(100, ours(0)), (100, ours(2)), (late, ours(3))]
    assert looked(Recorded(looks), logs.parse_cursor(None, 1)) == ["text 0", "text 2", "text 3"]
    looks = [(100, ours(0)), (101, ours(2))]
    assert looked(Recorded(looks), logs.parse_cursor(None, 1)) == ["text 0"]
    assert looked(Recorded(looks), logs.parse_cursor(None, 1), over=True) == ["text 0", "text 2"]


def test_words_of_the_image_itself_are_shown_once() -> None:
    positions = logs.parse_cursor(None, 1)
    recorded = Recorded([(100, "exec failed"), (100, "exec failed"), (100, ours(0))])
    assert looked(recorded, positions) == ["exec failed", "exec failed", "text 0"]
    recorded.looks[0].append((100, "more"))
    assert looked(recorded, positions) == ["more"] and looked(recorded, positions) == []

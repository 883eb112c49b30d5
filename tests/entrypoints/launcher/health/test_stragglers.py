"""Which nodes are stragglers: on a clock of the test, by step numbers of lines and by GPU clocks."""

from __future__ import annotations

import random

import pytest
from launcher.health.stragglers import SLOW_S, Pace, Stragglers
from launcher.usage import QUERIES, Usage

from cloudtrain.testing.clock import VirtualClock

EVERY_S = 10


def compare(speeds: dict[int, dict], seconds: float = SLOW_S, then: dict[int, dict] | None = None) -> list:
    """Return what is found while nodes report the same figures for some time, and then others."""
    stragglers, found = Stragglers(), []
    for at in range(0, int(seconds) + 1, EVERY_S):
        for node, figures in {**speeds, **(then or {} if at > seconds / 2 else {})}.items():
            stragglers.add(node, figures)
        found += stragglers.look(float(at))
    return found


def test_a_slow_node_is_named_once_after_ten_minutes_with_its_cause():
    speeds = {node: {"step_s": 0.4} for node in range(4)}
    speeds[2] = {"step_s": 0.55, "slowdown": "GPU 1 is slowed down: it is too hot"}
    assert compare(speeds, SLOW_S - EVERY_S) == []
    [(node, text)] = compare(speeds, 3 * SLOW_S)
    assert node == 2
    assert text == (
        "0.55 s per step, 27 % slower than the median of the nodes, for 10 minutes; GPU 1 is slowed down: it is too hot"
    )


def test_a_low_clock_is_named_where_the_ranks_wait_for_each_other():
    speeds = {node: {"step_s": 0.5, "clock": 0.98} for node in range(2)}
    speeds[1] = {"step_s": 0.5, "clock": 0.61}
    [(node, text)] = compare(speeds)
    assert node == 1 and text.startswith("GPU clock at 61 % of its highest, 38 % slower")


def test_a_node_that_recovers_is_not_named_and_may_be_later():
    stragglers = Stragglers()
    found = []
    for at in range(0, 4000, EVERY_S):
        stragglers.add(0, {"step_s": 1.0})
        stragglers.add(1, {"step_s": 1.0 if at % 1500 < 700 else 2.0})
        found += [at for _ in stragglers.look(float(at))]
    assert found == [1300, 2800]  # 10 minutes after each time that it became slow
    assert compare({0: {"step_s": 1.0}, 1: {"step_s": 2.0}}, SLOW_S * 1.5, {1: {"step_s": 1.1}}) == []


@pytest.mark.parametrize("nodes", [1, 2, 3, 64])
def test_healthy_nodes_give_no_alarm(nodes):
    for seed in range(20):
        drawn = random.Random(seed)
        stragglers = Stragglers()
        for at in range(0, 2400, 60):
            for node in range(nodes):
                speed = {"step_s": 0.5 * drawn.uniform(0.9, 1.1), "clock": drawn.uniform(0.9, 1.0)}
                # A step now and then, as with a checkpoint or an evaluation, takes twice as long.
                stragglers.add(node, {"step_s": 1.0} if drawn.random() < 0.05 else speed)
            assert stragglers.look(float(at)) == []


def test_nodes_without_figures_are_not_compared():
    assert compare({0: {"step_s": 1.0}, 1: {}, 2: {"clock": 0.5}}) == []


@pytest.mark.parametrize(
    "line",
    [
        b'::cloudtrain::{"kind":"metric","step":%d,"loss":0.3}',
        b"step %d loss 0.3",
        b"[1,2] Epoch 1 Step: %d | lr 3e-4",
        b" iteration       %d/ 5000 | consumed samples: 12",
        b"{'loss': 0.3, 'global_step=%d'}",
    ],
)
def test_the_time_of_a_step_is_read_from_a_ranks_lines(line):
    clock = VirtualClock()
    pace = Pace(clock)
    assert pace.step_s is None
    for step in range(0, 3000, 10):
        pace.printed(0, [b"loading", line.replace(b"%d", b"%d" % step), b"saved"])
        if step % 20 == 0:
            pace.printed(1, [line.replace(b"%d", b"%d" % (step // 2))])  # half as many
        clock.sleep(5.0)
    assert pace.step_s == pytest.approx(1.0, rel=0.1)


def test_a_new_epoch_counts_anew_and_lines_without_a_step_count_for_nothing():
    clock = VirtualClock()
    pace = Pace(clock)
    for step in [*range(100), *range(100)]:
        pace.printed(0, [b"step %d" % step])
        clock.sleep(2.0)
    assert pace.step_s == pytest.approx(2.0)
    pace = Pace(clock)
    pace.printed(0, [b"stepping stones", b"footstep 7", b"steps: many", b"epoch 3", b"x" * 10**6])
    assert pace.step_s is None


def test_gpu_clocks_are_read_beside_the_use():
    usage = Usage(VirtualClock())
    assert usage.gpu_clock == {}
    usage.parse(
        b"0, 97, 40211, 81559, 1965, 1980, 0x0000000000000000\n1, 98, 40211, 81559, 1210, 1980, 0x0000000000000040\n"
    )
    usage.parse(b"2, 0, 10, 81559, 345, 1980, 0x0000000000000001\n3, 90, 10, 81559, [N/A], [N/A], [N/A]\n")
    assert usage.gpu_clock == {"clock": 0.611, "slowdown": "GPU 1 is slowed down: it is too hot"}
    assert [gpu.get("clock_mhz") for gpu in usage.sample()["gpus"]] == [1965, 1210, 345, None]
    assert len(QUERIES) == 3 and "clocks" not in QUERIES[-1]

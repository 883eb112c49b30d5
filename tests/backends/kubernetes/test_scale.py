"""Large jobs and many runs: what a cluster is sent and asked, on the simulator, and how a node asks for node 0."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.kubernetes.scale import NODES, PICTURE, RUNS, Calls, calls, draw
from tests.backends.kubernetes.test_request import made

PER_NODE, PER_MINUTE = 3, 120
LARGE = {
    "job": ({"num_nodes": 256, "resources": {"accelerators": "H100:8"}}, {}, 1000),
    "jobset": ({"num_nodes": 256, "resources": {"accelerators": "H100:8"}}, {"kind": "jobset"}, 1000),
    "trainjob": (
        {"num_nodes": 256, "resources": {"accelerators": "H100:8"}}, {"kind": "trainjob", "runtime": "torch-never"}, 1000
    ),
}  # fmt: skip


@pytest.fixture
def measured(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    with calls(tmp_path, home, monkeypatch) as made:
        yield made


@pytest.mark.parametrize("kind", LARGE)
def test_256_nodes_are_said_once(kind: str) -> None:
    request = made(*LARGE[kind])
    assert request.problems == [] and request.manifest.nodes == 256
    small = made({**LARGE[kind][0], "num_nodes": 2}, *LARGE[kind][1:])
    large, few = (len(json.dumps(each.to_dict()["manifests"])) for each in (request, small))
    assert large < 10_000 and large - few < 100


@pytest.mark.parametrize("nodes", [8, 256])
def test_a_start_takes_at_most_three_calls_a_node(measured: Calls, nodes: int) -> None:
    start, minute = measured.of_a_start(nodes)
    assert start <= PER_NODE * nodes and minute <= PER_MINUTE
    lists = sum(path.partition("?")[0].endswith("/pods") for _, path in measured.cluster.server.requests)
    assert lists <= 40, "no node is asked for alone"


@pytest.mark.parametrize("runs", [20, 200])
def test_live_runs_take_at_most_two_calls_a_second_together(measured: Calls, runs: int) -> None:
    assert max(measured.of_live_runs(runs)) <= PER_MINUTE


def test_the_picture_is_drawn_of_figures_within_the_limits() -> None:
    drawn = PICTURE.read_text("utf-8")
    shown = [float(text) for text in re.findall(r'fill="#2471a3">([0-9.]+)<', drawn)]
    starts, live = dict(zip(NODES, map(int, shown[: len(NODES)]), strict=True)), shown[len(NODES) :]
    assert drawn == draw(starts, dict(zip(RUNS, live, strict=True)))
    assert starts[256] <= PER_NODE * 256 and max(live) <= PER_MINUTE / 60

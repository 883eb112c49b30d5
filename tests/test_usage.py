"""What a usage event says of a node, whoever printed it."""

from __future__ import annotations

import json

import pytest

from cloudtrain import events

FULL = {"index": 1, "percent": 87.5, "memory_bytes": 40 << 30, "memory_total_bytes": 80 << 30}


def test_what_a_launcher_tells_is_there():
    told = events.read_usage({"cpu_percent": 250.4, "rss_bytes": 12, "processes": 3, "gpus": [FULL]})
    assert told == events.Usage(250.4, 12.0, (events.Gpu(1, 87.5, 40 << 30, 80 << 30),)) and told


@pytest.mark.parametrize("odd", ["x", "5", None, True, {"a": 1}, [1], -1, float("nan"), float("inf"), 10**400])
def test_what_does_not_fit_is_not_there(odd):
    assert events.read_usage({"cpu_percent": odd, "rss_bytes": 7}) == events.Usage(None, 7.0, ())
    assert events.read_usage({"gpus": [FULL | {"percent": odd}]}).gpus == (events.Gpu(1, None, 40 << 30, 80 << 30),)
    assert events.read_usage({"gpus": [{"percent": 3}, FULL | {"index": odd}]}).gpus[1].index == 1  # its place
    assert not events.read_usage({"cpu_percent": odd, "rss_bytes": odd, "gpus": odd})
    assert not events.read_usage({"gpus": [odd, {"percent": odd}, {}]})


def test_a_marked_line_holds_more_gpus_than_are_listened_to():
    line = events.MARK + json.dumps({"kind": "usage", "gpus": [{"percent": 1}] * 400})
    kind, data = events.parse(line)
    assert kind == "usage" and len(events.read_usage(data).gpus) == events.MOST_GPUS

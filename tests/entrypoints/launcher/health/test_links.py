"""A slow network card of one of three real hosts is named: measure.py on hosts of the lab, judged as node 0 does."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from launcher.health import figures, measure
from launcher.health.verdict import judge


@pytest.mark.train
@pytest.mark.timeout(600)
def test_a_slow_link_is_named(lab):
    hosts = lab.hosts[:3]

    def look(port: int) -> list[tuple[int, str]]:
        world = {
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "3",
            "GLOO_SOCKET_IFNAME": "eth0",
        }

        def measured(rank: int) -> dict:
            env = {**world, "RANK": str(rank), "PATH": "/usr/bin:/bin"}
            return figures.read(hosts[rank].run([sys.executable, measure.__file__, "120"], env=env).encode())

        with ThreadPoolExecutor(3) as pool:
            nodes = dict(enumerate(pool.map(measured, range(3))))
        assert all(node["link"].get("pair") for node in nodes.values()), nodes
        return [(node, text) for node, _, text in judge(nodes) if text.startswith(("network", "all-reduce"))]

    assert look(29501) == []
    shaped = ("dev", "eth0", "root", "tbf", "rate", "25mbit", "burst", "64kb", "latency", "400ms")
    hosts[1].run(["tc", "qdisc", "add", *shaped])
    try:
        [(node, text)] = look(29502)
    finally:
        hosts[1].run(["tc", "qdisc", "del", "dev", "eth0", "root"])
    assert node == 1 and text.startswith("network 0."), text

"""The simulated Akash network: a plain script by the documented routes, the public schema, and the fixtures of its authors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cloudtrain.simulators import replicas
from tests.backends.akash.schema import check_sdl
from tests.simulators.akash.server import API_KEY, Simulator

BY_HAND = Path(__file__).parent / "by_hand_akash.py"


def test_a_script_that_knows_nothing_of_us(tmp_path: Path) -> None:
    with Simulator(tmp_path / "akash", check_sdl=check_sdl) as simulator:
        command = [sys.executable, BY_HAND, simulator.url, API_KEY, tmp_path / "greeting"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={"PATH": "/usr/bin:/bin"})
        assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["without_key"][0] == 401 and seen["without_key"][1]["message"] == "Invalid API key"
    assert seen["bad_sdl"][0] == 400 and "'9' is not one of" in seen["bad_sdl"][1]["message"]
    assert seen["created"] == [201, ["dseq", "manifest", "signTx"]] and seen["listed"] == [True]
    assert seen["bids"] == [2, "open", "uact", ["bseq", "dseq", "gseq", "oseq", "owner", "provider"]]
    assert seen["leased"] == [200, ["active"]], "a second POST makes no second lease"
    assert seen["worker"] == ["reached the server"] * 2, "services reach each other, and are started again"
    assert seen["services"] == ["server", "worker"]
    assert seen["gateway"] == [401, ["forwarded_ports", "ips", "services"]] and seen["manifest"] == [200, None]
    assert seen["closed"] == [[200, {"data": {"success": True}}]] * 2
    assert seen["after"] == ["closed", [["closed", None]]] and seen["listed_after"] == []
    assert seen["absent"][0] == 404 and seen["absent"][1]["message"] == "Deployment not found"
    assert [place for _, place in replicas.list_processes() if place.startswith(str(tmp_path))] == []

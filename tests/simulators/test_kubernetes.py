"""The simulated cluster is believed because Kubernetes' own client agrees with it, by a script that imports nothing of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cloudtrain.simulators import replicas
from cloudtrain.simulators.kubernetes import Cluster

SCRIPT = Path(__file__).with_name("by_hand_kubernetes.py")


def test_the_official_client_agrees_with_it(tmp_path: Path):
    assert "cloudtrain" not in SCRIPT.read_text()
    with Cluster(tmp_path / "cluster") as cluster:
        command = [sys.executable, str(SCRIPT), str(cluster.kubeconfig)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, env=dict(os.environ))
    assert done.stdout.strip() == "all of it", done.stdout + done.stderr
    assert [place for _, place in replicas.marked() if place.startswith(str(tmp_path))] == []

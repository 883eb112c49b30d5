"""Kubernetes' official client runs against the simulated cluster, in a script that imports nothing of cloudtrain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from cloudtrain.simulators import replicas
from cloudtrain.simulators.http import Request, Response, Server
from tests.conftest import require, wait_for
from tests.simulators.kubernetes_cluster.server import Cluster

SCRIPT = Path(__file__).with_name("by_hand_kubernetes.py")


def test_the_official_client_agrees_with_it(tmp_path: Path):
    assert "cloudtrain" not in SCRIPT.read_text()
    with Cluster(tmp_path / "cluster") as cluster:
        command = [sys.executable, str(SCRIPT), str(cluster.kubeconfig)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, env=dict(os.environ))
    assert done.stdout.strip() == "all of it", done.stdout + done.stderr
    assert [folder for _, folder in replicas.list_processes() if folder.startswith(str(tmp_path))] == []


def proxy(cluster: Cluster) -> Server:
    """What `kubectl proxy` is: it adds the token, which kubectl keeps from a server without TLS."""

    def forward(request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name in ("content-type", "accept")}
        headers["Authorization"] = f"Bearer {cluster.token}"
        address = f"{cluster.url}{request.path}"
        forwarded = urllib.request.Request(address, request.body or None, headers, method=request.method)
        try:
            with urllib.request.urlopen(forwarded, timeout=60) as answer:
                return Response(answer.read(), answer.status)
        except urllib.error.HTTPError as error:
            return Response(error.read(), error.code)

    return Server([(method, "/.*", forward) for method in ("GET", "POST", "PATCH", "DELETE")])


def test_kubectl_applies_planned_manifests_and_they_run(tmp_path: Path):
    require("kubectl")
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("import os; print('world', os.environ['WORLD_SIZE'])")
    (project / "data.bin").write_bytes(os.urandom(60_000))
    (project / "cloudtrain.toml").write_text('[targets.there]\nbackend = "kubernetes"\nimage = "any:1"\n')
    with Cluster(tmp_path / "cluster") as cluster:
        proxy_server = proxy(cluster)
        config = json.loads(cluster.kubeconfig.read_text())
        config["clusters"][0]["cluster"]["server"] = proxy_server.url
        (tmp_path / "config").write_text(json.dumps(config))
        env = {**os.environ, "KUBECONFIG": str(tmp_path / "config"), "HOME": str(tmp_path)}

        def done(*words: str, given: str = "") -> str:
            ended = subprocess.run(
                words, cwd=project, env=env, input=given, capture_output=True, text=True, timeout=200
            )
            assert ended.returncode == 0, ended.stdout + ended.stderr
            return ended.stdout

        plan = (sys.executable, "-m", "cloudtrain.cli", "plan", "train.py", "-t", "there", "--set", "num_nodes=2")
        manifests = done(*plan, "--manifests")
        assert len(manifests) > 262_144, "the limit of annotations, into which kubectl alone copies what it applies"
        apply = ("kubectl", "apply", "--validate=false", "-f", "-")  # the simulator has no OpenAPI
        refused = subprocess.run(
            apply, cwd=project, env=env, input=manifests, capture_output=True, text=True, timeout=200
        )
        assert refused.returncode == 1 and "metadata.annotations: Too long" in refused.stderr
        for kind in ("job", "service"):  # these were small enough
            done("kubectl", "delete", kind, "--all", "--wait=false")
        wait_for(lambda: not cluster.objects.all("jobs"), "the Job to be gone")
        apply = (*apply[:2], "--server-side", *apply[2:])
        assert done(*apply, given=manifests).count("serverside-applied") == 3
        (job,) = cluster.objects.all("jobs")
        wait_for(lambda: any(c["type"] == "Complete" for c in job["status"].get("conditions", ())), "its end")
        pods = done("kubectl", "get", "pods", "-o", "name").split()
        assert len(pods) == 2 and all(" world 2\n" in done("kubectl", "logs", pod, "-c", "node") for pod in pods)
        proxy_server.close()

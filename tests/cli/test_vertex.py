"""The same job file with -t vertex, through the whole command line, with both clients; and what vertex-local leaves behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.simulators.vertex import server
from cloudtrain.simulators.vertex.server import Simulator
from tests.cli.conftest import Cli
from tests.conftest import wait_for

DOCS = Path(__file__).parents[2] / "docs" / "vertex.md"
# call -> the permission that it needs
PERMISSIONS = {
    r"GET .*/customJobs(\?.*)?": "aiplatform.customJobs.list",
    r"GET .*/customJobs/\d+": "aiplatform.customJobs.get",
    r"POST .*/customJobs(\?.*)?": "aiplatform.customJobs.create",
    r"POST .*/customJobs/\d+:cancel": "aiplatform.customJobs.cancel",
    r"GET /storage/v1/b/[^/]+/o/.*": "storage.objects.get",
    r"GET /storage/v1/b/[^/]+/o(\?.*)?": "storage.objects.list",
    r"POST /upload/.*": "storage.objects.create",
    r"PUT /upload/.*": "storage.objects.create",
    r"DELETE /storage/.*": "storage.objects.delete",
    r"POST /v2/entries:list": "logging.logEntries.list",
    r"GET /v2/.*/manifests/.*": "artifactregistry.repositories.downloadArtifacts",
    r"POST /simulator/.*": "",
}


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[Simulator]:
    with Simulator(tmp_path / "simulator") as made:
        yield made


@pytest.mark.parametrize("client", ["rest", "sdk"])
def test_a_target_on_vertex_from_plan_to_fetch(
    simulator: Simulator, project: Path, shell: Cli, tmp_path: Path, client: str
):
    (project / "cloudtrain.toml").write_text(
        '[targets.prod]\nbackend = "vertex"\nproject = "local"\nbucket = "local"\n'
        'image = "us-docker.pkg.dev/local/any/gpu:1"\nsettle_s = 1\n'
        f'endpoint = "{simulator.url}"\nclient = "{client}"\n'
    )
    (project / "job.yaml").write_text(
        "name: prod\nentrypoint: train.py\nnum_nodes: 2\ntarget: prod\nresources: {use_spot: true}\n"
    )
    planned = shell("plan", "job.yaml", "--json")
    assert planned.code == 0, planned.err
    assert planned.json["request"]["customJob"]["jobSpec"]["scheduling"]["strategy"] == "SPOT"
    before = len(simulator.server.requests)
    assert before == 0, "a plan asks nobody"
    shell("plan", "job.yaml", "-o", "plan.json")

    done = shell("submit", "plan.json", "--follow")
    assert done.code == 0, done.out + done.err
    assert "rank 0 of 2" in done.out and "rank 1 of 2" in done.out and done.out.count("] done") == 2
    (sent,) = [
        json.loads(body)
        for method, path, body in simulator.server.request_bodies
        if re.search(r"POST .*/customJobs(\?|$)", f"{method} {path}")
    ]
    plan = json.loads((project / "plan.json").read_text())
    assert sent["labels"] == plan["request"]["customJob"]["labels"]
    assert (
        sent["jobSpec"]["workerPoolSpecs"][1]["containerSpec"]
        == plan["request"]["customJob"]["jobSpec"]["workerPoolSpecs"][1]["containerSpec"]
    )
    fetched = shell("fetch", plan["run_id"], "-o", tmp_path / "out")
    assert fetched.code == 0 and (tmp_path / "out" / "model" / "weights").read_text() == "12345", fetched.err

    gate = tmp_path / "gate"
    begun = shell("submit", "job.yaml", "--json", "--new", "--", "--gate", gate)
    assert begun.code == 0, begun.err
    run, number = begun.json["run_id"], begun.json["handle"].rpartition("/")[2]

    def lines(word: str) -> int:
        return sum(word in line for line in shell("logs", run).out.splitlines())

    wait_for(lambda: lines("rank 0 of 2") == 1, "the first start")
    simulator.jobs.preempt(number)
    wait_for(lambda: lines("rank 0 of 2") == 2, "the start after the Spot loss")
    cancelled = shell("cancel", run)
    assert cancelled.code == 0, cancelled.err
    assert shell("wait", run).code == 130
    assert shell("show", run, "--json").json["state"] == "CANCELLED"

    needed = set()
    for method, path in simulator.server.requests:
        found = [permission for call, permission in PERMISSIONS.items() if re.fullmatch(call, f"{method} {path}")]
        assert found, f"{method} {path} needs a permission that nobody has named"
        needed.add(found[0])
    assert "artifactregistry.repositories.downloadArtifacts" in needed
    text = DOCS.read_text()
    assert {permission for permission in needed if f"`{permission}`" not in text} == set()


def test_vertex_local_survives_the_command_line_and_ends_when_idle(
    project: Path, shell: Cli, home: Path, tmp_path: Path
):
    (project / "job.yaml").write_text("name: here\nentrypoint: train.py\nnum_nodes: 2\ntarget: vertex-local\n")
    gate = tmp_path / "gate"
    begun = shell("submit", "job.yaml", "--json", "--", "--gate", gate)
    assert begun.code == 0, begun.err
    folder = home / "simulators" / "vertex"
    assert server.find_url(folder) and (folder / "server.json").stat().st_mode & 0o077 == 0
    gate.touch()
    assert shell("wait", begun.json["run_id"]).code == 0
    (folder / "server.json").unlink()  # its sign to leave; otherwise it does when nobody has asked for a minute
    wait_for(lambda: server.find_url(folder) is None, "its end")
    again = shell("logs", begun.json["run_id"])  # a new one knows what the former did
    assert again.code == 0 and again.out.count("through the gate") == 2
    into = tmp_path / "out"
    assert shell("fetch", begun.json["run_id"], "-o", into).code == 0
    assert (into / "model" / "weights").exists()
    (folder / "server.json").unlink(missing_ok=True)

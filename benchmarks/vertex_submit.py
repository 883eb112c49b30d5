"""What it costs to submit one custom job: our light client, our SDK client, and a hand-written script of Google's SDK.

    python benchmarks/vertex_submit.py [--rounds 5]

All three send to the same simulator, which runs nothing. CPU seconds of the whole process are compared.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

from measure import Sample, interleaved, median, process, report, spread, table

from cloudtrain.simulators.vertex.lifecycle import Behavior
from cloudtrain.simulators.vertex.server import Simulator

OURS = """
import sys
from cloudtrain import Submitter
options = dict(project="local", bucket="local", image="any:1", endpoint=sys.argv[1], client=sys.argv[2])
run = Submitter("vertex", watch=False, **options).submit("job.yaml", new=True)
"""
BY_HAND = """
import os, sys, tarfile
os.environ["STORAGE_EMULATOR_HOST"] = sys.argv[1]
from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform, storage
with tarfile.open("/tmp/by-hand-%d.tar.gz" % os.getpid(), "w:gz") as tar:
    tar.add("train.py")
bucket = storage.Client(project="local", credentials=AnonymousCredentials()).bucket("local")
bucket.blob("by-hand.tar.gz").upload_from_filename(tar.name)
os.unlink(tar.name)
aiplatform.init(project="local", location="us-central1", staging_bucket="gs://local", credentials=AnonymousCredentials(),
                api_endpoint=sys.argv[1], api_transport="rest")
pool = {"machine_spec": {"machine_type": "e2-standard-4"}, "replica_count": 1,
        "container_spec": {"image_uri": "any:1", "command": ["python3", "-c", "pass"]}}
aiplatform.CustomJob(display_name="by-hand", worker_pool_specs=[pool], base_output_dir="gs://local/out").submit()
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with (
        tempfile.TemporaryDirectory() as name,
        Simulator(Path(name) / "vertex", behavior=Behavior(execute=False)) as simulator,
    ):
        source = Path(name) / "source"
        source.mkdir()
        (source / "train.py").write_text("print(1)\n")
        (source / "job.yaml").write_text("name: bench\nentrypoint: train.py\n")
        env = dict(os.environ, CLOUDTRAIN_HOME=f"{name}/home")

        def run(script: str, *words: str) -> Sample:
            return process([sys.executable, "-c", script, simulator.url, *words], env, source)

        found = interleaved(
            {
                "cloudtrain, client rest": lambda: run(OURS, "rest"),
                "cloudtrain, client sdk": lambda: run(OURS, "sdk"),
                "Google's SDK by hand": lambda: run(BY_HAND),
            },
            rounds,
        )
        asked = [f"{method} {path}" for method, path in simulator.server.requests]
    creates = sum(bool(re.match(r"POST .*/customJobs", call)) for call in asked)
    uploads = sum("POST /upload/" in call and "src" in call for call in asked)
    body = table([(name, spread(samples, "cpu"), spread(samples, "wall")) for name, samples in found.items()],
                 ["submit", "CPU s: median (min to max)", "wall s: median (min to max)"])  # fmt: skip
    gates = [
        ("client rest, CPU s", median(found["cloudtrain, client rest"], "cpu"), 0.4),
        (
            "client sdk, CPU, of the SDK's by hand",
            median(found["cloudtrain, client sdk"], "cpu") / median(found["Google's SDK by hand"], "cpu"),
            1.1,
        ),
        ("create calls for one submit", creates / (3 * (rounds + 1)), 1),
        ("uploads of an unchanged source, in all submits", uploads, 1),
    ]
    return report("vertex_submit", "Submitting a custom job, beside google-cloud-aiplatform", body, gates)


if __name__ == "__main__":
    sys.exit(main())

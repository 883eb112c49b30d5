"""What a submit to SageMaker costs a client: our backend (boto3) beside boto3 by hand, and our estimator beside one by hand.

python benchmarks/sagemaker_submit.py                      # boto3 only
python benchmarks/sagemaker_submit.py --sdk PYTHON         # an interpreter that has sagemaker<3 as well

Every figure is the CPU time of a fresh process, imports included, against the simulator in another process; the bundle is
made beforehand. Calls are those that the service saw; bytes are uploads.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cloudtrain.backends.sagemaker import SagemakerBackend
from cloudtrain.bundle import Bundle
from cloudtrain.job import Job
from cloudtrain.simulators.sagemaker import REGION, ROLE, Simulator

ROOT = Path(__file__).parents[1]
BUCKET = "bench"
OURS = """
import sys
from pathlib import Path
from cloudtrain.backend import Plan
from cloudtrain.backends.sagemaker import SagemakerBackend
from cloudtrain.bundle import Bundle
plan = Plan.from_json(Path(sys.argv[2]).read_text())
home = Path(sys.argv[1])
bundle = Bundle.stored(home / "bundles", plan.bundle["sha256"])
SagemakerBackend(plan.job["options"]["sagemaker"], home / "runs").submit(plan, bundle)
"""
BOTO3 = """
import json, sys
import boto3
plan = json.load(open(sys.argv[2]))
key = plan["request"]["InputDataConfig"][-1]["DataSource"]["S3DataSource"]["S3Uri"].split("/", 3)[3]
with open(f"{sys.argv[1]}/bundles/{plan['bundle']['sha256']}.tar.gz", "rb") as file:
    boto3.client("s3").put_object(Bucket="bench", Key=key + "by-hand", Body=file)
boto3.client("sagemaker").create_training_job(**plan["request"])
"""
ESTIMATOR = """
import json, os, sys
os.environ["SAGEMAKER_SUPPRESS_V2_WARNING"] = "1"
import boto3, sagemaker
from sagemaker.huggingface import HuggingFace
from sagemaker.telemetry import telemetry_logging
telemetry_logging._send_telemetry_request = lambda *_, **__: None
plan = json.load(open(sys.argv[2]))
request = plan["request"]
session = sagemaker.Session(boto3.Session(), default_bucket="bench")
made = HuggingFace(entry_point="train.py", source_dir=sys.argv[3], image_uri="any", role=request["RoleArn"],
    instance_count=1, instance_type="ml.m5.xlarge", py_version="py3", output_path="s3://bench/out",
    code_location="s3://bench/code", sagemaker_session=session, debugger_hook_config=False, disable_profiler=True)
made.fit(wait=False, job_name=request["TrainingJobName"])
"""


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdk", help="interpreter of an environment with sagemaker<3")
    parser.add_argument("--runs", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        simulator = Simulator(Path(folder) / "hosts")
        simulator.make_bucket(BUCKET)
        simulator.habits.pending_s = 3600.0  # nothing runs: what a job costs is not measured here
        ways = [("ours, boto3", sys.executable, OURS, "boto3"), ("boto3 by hand", sys.executable, BOTO3, "boto3")]
        if chosen.sdk:
            ways += [("ours, estimator", chosen.sdk, OURS, "sdk"), ("estimator by hand", chosen.sdk, ESTIMATOR, "sdk")]
        print(f"{'way':20} {'CPU s, median of ' + str(chosen.runs):>24} {'calls':>6} {'uploaded':>10} {'again':>8}")
        for way, python, script, client in ways:
            seen = [measured(simulator, Path(folder), python, script, client, run) for run in range(chosen.runs)]
            first, last = seen[0], seen[-1]
            cpu_s = statistics.median(cpu for cpu, _, _ in seen)
            print(f"{way:20} {cpu_s:24.2f} {first[1]:6} {first[2]:10,} {last[2]:8,}")
        simulator.close()
    return 0


def measured(
    simulator: Simulator, folder: Path, python: str, script: str, client: str, run: int
) -> tuple[float, int, int]:
    """Submit once in a process of its own; return CPU seconds, calls and uploaded bytes."""
    source, home = folder / "source", folder / f"home-{client}"
    source.mkdir(exist_ok=True)
    (source / "train.py").write_text("print('hello')\n")
    bundle = Bundle.make(source, home / "bundles")
    options = {"role": ROLE, "bucket": BUCKET, "region": REGION, "image": "any", "client": client}
    options |= {"endpoint": simulator.url, "prefix": f"by-{client}"}
    job = Job.from_dict(
        {"name": "bench", "source": str(source), "entrypoint": "train.py", "options": {"sagemaker": options}}
    )
    plan = SagemakerBackend(options, home / "runs").plan(job, bundle, f"bench-{abs(hash((python, script)))}-{run}")
    (folder / "plan.json").write_text(plan.to_json())
    simulator.calls.clear()
    simulator.uploaded_bytes = 0
    env = {**os.environ, **simulator.environ, "PYTHONPATH": str(ROOT)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [str(home), str(folder / "plan.json"), str(source)]
    subprocess.run([python, "-c", script, *words], env=env, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    calls = simulator.calls[: simulator.calls.index("sagemaker:CreateTrainingJob") + 1]
    simulator.jobs[plan.attempt_id].stop()
    simulator.jobs[plan.attempt_id].thread.join()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, len(calls), simulator.uploaded_bytes


if __name__ == "__main__":
    sys.exit(main())

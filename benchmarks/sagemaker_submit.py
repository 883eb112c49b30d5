"""What a submit to SageMaker costs: ours with either client, the same by hand, and torchx's dry run beside `plan`.

    python benchmarks/sagemaker_submit.py [--rounds 5] [--sdk PYTHON]

All send to the same simulator, which runs nothing; CPU seconds of whole processes are compared, imports included. Calls and
uploaded bytes are what the simulator has counted. PYTHON has sagemaker 2.257.7 and what cloudtrain needs; without it a
virtual environment is made on first use, as one is for torchx.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from measure import ROOT, Sample, interleaved, median, peer, process, report, spread, table

from cloudtrain.simulators.sagemaker.server import REGION, ROLE, Simulator

BUCKET = "bench"
SDK = "sagemaker==2.257.7"
JOB = """
name: bench
entrypoint: train.py
environment: {{requirements: none}}
image: any
resources: {{instance_type: ml.m5.xlarge}}
options:
  sagemaker: {{role: "{role}", bucket: {bucket}, prefix: {client}, region: {region}, endpoint: "{url}", client: {client}}}
"""
BOTO3 = """
import sys, tarfile
import boto3
role, bucket, name = sys.argv[1:]
packed = "../" + name + ".tar.gz"
with tarfile.open(packed, "w:gz") as tar:
    tar.add("train.py")
with open(packed, "rb") as file:
    boto3.client("s3").put_object(Bucket=bucket, Key=name + "/source.tar.gz", Body=file)
channel = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{bucket}/{name}/"}
boto3.client("sagemaker").create_training_job(
    TrainingJobName=name,
    RoleArn=role,
    AlgorithmSpecification={"TrainingImage": "any", "TrainingInputMode": "File", "ContainerEntrypoint": ["python3"]},
    InputDataConfig=[{"ChannelName": "code", "DataSource": {"S3DataSource": channel}}],
    OutputDataConfig={"S3OutputPath": f"s3://{bucket}/out"},
    ResourceConfig={"InstanceCount": 1, "InstanceType": "ml.m5.xlarge", "VolumeSizeInGB": 100},
    StoppingCondition={"MaxRuntimeInSeconds": 86400},
)
"""
ESTIMATOR = """
import os, sys
os.environ["SAGEMAKER_SUPPRESS_V2_WARNING"] = "1"
import boto3, sagemaker
from sagemaker.huggingface import HuggingFace
from sagemaker.telemetry import telemetry_logging
telemetry_logging._send_telemetry_request = lambda *_, **__: None
role, bucket, name = sys.argv[1:]
session = sagemaker.Session(boto3.Session(), default_bucket=bucket)
made = HuggingFace(entry_point="train.py", source_dir=".", image_uri="any", role=role,
    instance_count=1, instance_type="ml.m5.xlarge", py_version="py3", output_path=f"s3://{bucket}/out",
    code_location=f"s3://{bucket}/code", sagemaker_session=session, debugger_hook_config=False, disable_profiler=True)
made.fit(wait=False, job_name=name)
"""
OURS = """
import sys
from cloudtrain import Submitter
Submitter("sagemaker", watch=False).submit(sys.argv[1], new=True)
"""
LOOK = """
import sys
from cloudtrain.cli import main
assert main(sys.argv[1:]) == 0, sys.argv
sys.exit(99 if "sagemaker" in sys.modules else 0)
"""
IMPORTED = 99


@dataclass
class Way:
    """One way to submit: a process for each round, and what the service saw of it."""

    simulator: Simulator
    run: Callable[[int], Sample]
    calls: list[int] = field(default_factory=list)
    uploads: list[int] = field(default_factory=list)

    def __call__(self) -> Sample:
        self.simulator.calls.clear()
        self.simulator.uploaded_bytes = 0
        found = self.run(len(self.calls))
        self.calls.append(len(self.simulator.calls))
        self.uploads.append(self.simulator.uploaded_bytes)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", "--runs", type=int, default=5)
    parser.add_argument(
        "--sdk", type=Path, help="interpreter of an environment with sagemaker<3 and what cloudtrain needs"
    )
    chosen = parser.parse_args()
    beside = ["click", "pydantic", "PyYAML", "pathspec", "isal", "platformdirs"]
    sdk = str(chosen.sdk.absolute() if chosen.sdk else peer("sagemaker", SDK, *beside))
    torchx = peer("torchx-sagemaker", "torchx==0.7.0", SDK).parent / "torchx"
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        source.mkdir()
        simulator = Simulator(Path(name) / "hosts")
        simulator.make_bucket(BUCKET)
        simulator.behavior.pending_s = 3600.0  # nothing runs: what a job costs is not measured here
        (source / "train.py").write_text("print('hello')\n")
        for client in ("boto3", "sdk"):
            text = JOB.format(role=ROLE, bucket=BUCKET, region=REGION, url=simulator.url, client=client)
            (source / f"{client}.yaml").write_text(text)
        env = dict(os.environ, **simulator.environ, PYTHONPATH=str(ROOT), CLOUDTRAIN_HOME=f"{name}/home", HOME=name)
        dry = ["run", "-s", "aws_sagemaker", "--dryrun", "-cfg", f"role={ROLE},instance_type=ml.m5.xlarge"]
        dry += ["--workspace", "", "utils.python", "--script", "train.py", "--image", "any"]

        def way(*argv: object, named: str = "") -> Way:
            words = [str(word) for word in argv]
            return Way(simulator, lambda turn: process([*words, *([f"{named}-{turn}"] if named else [])], env, source))

        ways = {
            "cloudtrain, client boto3": way(sys.executable, "-c", OURS, "boto3.yaml"),
            "boto3 by hand": way(sys.executable, "-c", BOTO3, ROLE, BUCKET, named="by-hand"),
            "cloudtrain, client sdk": way(sdk, "-c", OURS, "sdk.yaml"),
            "estimator by hand": way(sdk, "-c", ESTIMATOR, ROLE, BUCKET, named="estimator"),
            "cloudtrain plan": way(sys.executable, "-m", "cloudtrain", "plan", "boto3.yaml", "-t", "sagemaker"),
            "torchx run --dryrun": way(torchx, *dry),
        }
        found = interleaved(ways, chosen.rounds)
        imports = sdk_imports(sdk, env, source)
        simulator.close()
    body = table(
        [
            (name, spread(samples, "cpu"), spread(samples, "wall"), ways[name].calls[-1], *ways[name].uploads[:2])
            for name, samples in found.items()
        ],
        ["command", "CPU s: median (min to max)", "wall s: median (min to max)", "calls", "bytes up, first", "second"],
    )
    body += f"\n\n{chosen.rounds} rounds, interleaved, after one that is not counted. The source is one file; ours"
    body += " carries the launcher with it, once. torchx 0.7.0's dry run is that of its aws_sagemaker scheduler: nothing is sent."

    def cpu(name: str) -> float:
        return median(found[name], "cpu")

    ours = [ways[name] for name in ways if name.startswith("cloudtrain, client")]
    gates = [
        ("client boto3, CPU s", cpu("cloudtrain, client boto3"), 0.65),
        ("client sdk, CPU, of the estimator's by hand", cpu("cloudtrain, client sdk") / cpu("estimator by hand"), 1.0),
        ("client sdk, calls", max(ways["cloudtrain, client sdk"].calls), 3),
        ("bytes uploaded by unchanged submits, all together", sum(sum(way.uploads[1:]) for way in ours), 0),
        ("of plan, ls and logs: those that import the SDK", imports, 0),
    ]
    return report(
        "sagemaker_submit", "Submitting a SageMaker training job, beside boto3, the SDK and torchx", body, gates
    )


def sdk_imports(sdk: str, env: dict[str, str], source: Path) -> int:
    """Return how many of three commands import the SDK, where it is installed."""

    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([sdk, *words], env=env, cwd=source, capture_output=True, text=True)
        if done.returncode not in (0, IMPORTED):
            sys.exit(f"{' '.join(words)} exited with {done.returncode}:\n{done.stderr}")
        return done

    newest = json.loads(ran("-m", "cloudtrain", "ls", "--json", "-n", "1").stdout)[0]
    commands = ["plan", "sdk.yaml", "-t", "sagemaker"], ["ls"], ["logs", newest["run_id"]]
    return sum(ran("-c", LOOK, *words).returncode == IMPORTED for words in commands)


if __name__ == "__main__":
    sys.exit(main())

"""A script as a user of boto3 writes it: trains on SageMaker and imports nothing of cloudtrain.

AWS_ENDPOINT_URL says where SageMaker is. Prints one JSON object with what it has seen.
"""

import datetime
import io
import json
import sys
import tarfile
import time

import boto3

SCRIPT = """
import json, os, pathlib, sys, time
base = pathlib.Path(os.environ["SAGEMAKER_BASE_DIR"])
config = json.loads((base / "input/config/resourceconfig.json").read_text())
given = json.loads((base / "input/config/hyperparameters.json").read_text())
print("host", config["current_host"], "of", len(config["hosts"]), flush=True)
print("given", given["lr"], os.environ["COLOUR"], (base / "input/data/train/a/x.txt").read_text(), flush=True)
state = base / "checkpoints/step"
print("checkpoint", state.read_text() if state.exists() else None, flush=True)
state.write_text("7")
(base / "model/weights").write_text("w" + config["current_host"][-1])
(base / "output/data/log").write_text("o")
if given["end"] == "fail":
    (base / "output/failure").write_text("it did not want to")
    sys.exit(3)
time.sleep(600 if given["end"] == "wait" else 0)
"""
BUCKET = "by-hand"

s3, sm, logs = (boto3.client(name) for name in ("s3", "sagemaker", "logs"))
s3.create_bucket(Bucket=BUCKET)
s3.put_object(Bucket=BUCKET, Key="code/run.py", Body=SCRIPT.encode())
s3.put_object(Bucket=BUCKET, Key="data/a/x.txt", Body=b"hello")


def request(name: str, end: str, nodes: int = 1, **more) -> dict:
    def channel(channel_name: str, prefix: str) -> dict:
        source = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{BUCKET}/{prefix}/"}
        return {"ChannelName": channel_name, "DataSource": {"S3DataSource": source}}

    code = "import os,runpy;runpy.run_path(os.environ['SAGEMAKER_BASE_DIR']+'/input/data/code/run.py')"
    return {
        "TrainingJobName": name,
        "HyperParameters": {"lr": "3.0e-4", "end": end},
        "AlgorithmSpecification": {
            "TrainingImage": "any",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [sys.executable, "-c", code],
        },
        "RoleArn": "arn:aws:iam::123456789012:role/training",
        "InputDataConfig": [channel("code", "code"), channel("train", "data")],
        "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/out"},
        "ResourceConfig": {"InstanceCount": nodes, "InstanceType": "ml.m5.xlarge", "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        "CheckpointConfig": {"S3Uri": f"s3://{BUCKET}/checkpoints"},
        "Environment": {"COLOUR": "blue"},
        "Tags": [{"Key": "team", "Value": "nlp"}],
        **more,
    }


def until(name: str, *statuses: str) -> dict:
    for _ in range(3000):
        found = sm.describe_training_job(TrainingJobName=name)
        if found["TrainingJobStatus"] in statuses or found["SecondaryStatus"] in statuses:
            return found
        time.sleep(0.05)
    raise SystemExit(f"{name} is still {found['TrainingJobStatus']}/{found['SecondaryStatus']}")


def lines(name: str) -> dict[str, list[str]]:
    group = "/aws/sagemaker/TrainingJobs"
    streams = logs.describe_log_streams(logGroupName=group, logStreamNamePrefix=f"{name}/")["logStreams"]
    return {
        stream["logStreamName"].split("/")[1].rpartition("-")[0]: [
            event["message"]
            for event in logs.get_log_events(
                logGroupName=group, logStreamName=stream["logStreamName"], startFromHead=True
            )["events"]
        ]
        for stream in streams
    }


def error(call, **values) -> str:
    try:
        call(**values)
    except sm.exceptions.ClientError as refused:
        return refused.response["Error"]["Code"]
    return "none"


seen = {}
arn = sm.create_training_job(**request("two", "done", nodes=2))["TrainingJobArn"]
done = until("two", "Completed", "Failed")
archive = s3.get_object(Bucket=BUCKET, Key="out/two/output/model.tar.gz")["Body"].read()
seen["two"] = {
    "status": done["TrainingJobStatus"],
    "environment": done["Environment"],
    "tags": sm.list_tags(ResourceArn=arn)["Tags"],
    "transitions": [change["Status"] for change in done["SecondaryStatusTransitions"]],
    "lines": lines("two"),
    "model": sorted(tarfile.open(fileobj=io.BytesIO(archive)).getnames()),  # noqa: SIM115
    "checkpoint": s3.get_object(Bucket=BUCKET, Key="checkpoints/step")["Body"].read().decode(),
    "again": error(sm.create_training_job, **request("two", "done")),
    "stop": error(sm.stop_training_job, TrainingJobName="two"),
}
sm.create_training_job(**request("bad", "fail"))
bad = until("bad", "Completed", "Failed")
seen["bad"] = {"status": bad["TrainingJobStatus"], "reason": bad["FailureReason"], "lines": lines("bad")}
sm.create_training_job(**request("long", "wait"))
until("long", "Training")
sm.stop_training_job(TrainingJobName="long")
seen["long"] = until("long", "Stopped")["TrainingJobStatus"]
limit = {"StoppingCondition": {"MaxRuntimeInSeconds": 1}}
sm.create_training_job(**request("limit", "wait", **limit))
seen["limit"] = until("limit", "Stopped")["SecondaryStatus"]
seen["unknown"] = error(sm.describe_training_job, TrainingJobName="nobody")
seen["spot"] = error(sm.create_training_job, **request("spot", "done", EnableManagedSpotTraining=True))
seen["listed"] = sorted(job["TrainingJobName"] for job in sm.list_training_jobs()["TrainingJobSummaries"])
pages = sm.get_paginator("list_training_jobs").paginate(PaginationConfig={"PageSize": 1})
seen["paged"] = [job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"]]
oldest_first = sm.list_training_jobs(SortBy="Name", SortOrder="Ascending", MaxResults=2)["TrainingJobSummaries"]
seen["sorted"] = [job["TrainingJobName"] for job in oldest_first]
later = sm.list_training_jobs(CreationTimeAfter=done["TrainingEndTime"] + datetime.timedelta(seconds=1))
seen["later"] = sorted(job["TrainingJobName"] for job in later["TrainingJobSummaries"])
stopped = sm.list_training_jobs(StatusEquals="Stopped", MaxResults=1)
seen["stopped"] = [job["SecondaryStatus"] for job in stopped["TrainingJobSummaries"]]
seen["too many"] = error(sm.list_training_jobs, MaxResults=101)
seen["token"] = error(sm.list_training_jobs, NextToken="nothing")
seen["ours"] = sorted(name for name in sys.modules if name.startswith("cloudtrain"))
print(json.dumps(seen))

"""A script as a user of boto3 writes it: sends training jobs through a queue of AWS Batch, imports nothing of cloudtrain.

AWS_ENDPOINT_URL says where the services are; the queue has room for one job. Prints one JSON object with what it has seen.
"""

import json
import sys
import time

import boto3
from botocore.exceptions import ClientError

BUCKET, QUEUE = "by-hand", "one"
s3, sm, batch = (boto3.client(name) for name in ("s3", "sagemaker", "batch"))
s3.create_bucket(Bucket=BUCKET)
seen: dict = {"queue": batch.describe_job_queues(jobQueues=[QUEUE])["jobQueues"][0]["jobQueueType"]}
seen["no queue"] = batch.describe_job_queues(jobQueues=["other"])["jobQueues"]


def payload(name: str, code: str, **more) -> str:
    request = {
        "TrainingJobName": name,
        "AlgorithmSpecification": {
            "TrainingImage": "any",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [sys.executable, "-c", code],
        },
        "RoleArn": "arn:aws:iam::123456789012:role/training",
        "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/out"},
        "ResourceConfig": {"InstanceCount": 1, "InstanceType": "ml.m5.xlarge", "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        **more,
    }
    return json.dumps(request)


def submit(name: str, text: str, **more) -> str:
    values = {"jobName": name, "jobQueue": QUEUE, "serviceJobType": "SAGEMAKER_TRAINING", "tags": {"team": "nlp"}}
    return batch.submit_service_job(**{**values, "serviceRequestPayload": text, **more})["jobId"]


def code(call, *given, **named) -> str:
    try:
        call(*given, **named)
    except ClientError as error:
        return error.response["Error"]["Code"]
    return ""


def until(job_id: str, *states: str) -> dict:
    for _ in range(1200):
        job = batch.describe_service_job(jobId=job_id)
        if job["status"] in states:
            return job
        time.sleep(0.1)
    raise TimeoutError(job["status"])


def names(**query) -> list[str]:
    return [job["jobName"] for job in batch.list_service_jobs(jobQueue=QUEUE, **query)["jobSummaryList"]]


END = ("SUCCEEDED", "FAILED")
first = submit("first", payload("first", "import time; time.sleep(600)"), clientToken="a")
second = submit("second", payload("second", "print(1)"))
seen["twice"] = code(submit, "first", payload("first", "import time; time.sleep(600)"), clientToken="a")
seen["states"] = [until(first, "RUNNING")["status"], batch.describe_service_job(jobId=second)["status"]]
seen["tags"] = batch.describe_service_job(jobId=first)["tags"]
seen["listed"] = [names(), names(jobStatus="RUNNABLE"), names(filters=[{"name": "JOB_NAME", "values": ["FIRST"]}])]
batch.terminate_service_job(jobId=first, reason="enough")
ended = until(first, *END)
seen["terminated"] = [ended["status"], ended["isTerminated"], ended["statusReason"]]
ended = until(second, *END)
arn = ended["latestAttempt"]["serviceResourceId"]["value"]
seen["second"] = [
    ended["status"],
    sm.describe_training_job(TrainingJobName=arn.rpartition("/")[2])["TrainingJobStatus"],
]
seen["name"] = arn.rpartition("/")[2]
failed = until(submit("bad", payload("bad", "exit(3)")), *END)
seen["bad"] = [failed["status"], failed["statusReason"], len(failed["attempts"])]
again = until(submit("again", payload("again", "exit(3)"), retryStrategy={"attempts": 2}), *END)
seen["attempts"] = len(again["attempts"])
waiting = submit("waiting", payload("waiting", "import time; time.sleep(600)"))
behind = submit("behind", payload("behind", "print(1)"))
batch.terminate_service_job(jobId=behind, reason="never mind")
seen["before its start"] = [batch.describe_service_job(jobId=behind)[key] for key in ("status", "isTerminated")]
batch.terminate_service_job(jobId=waiting, reason="end")
seen["refused"] = until(submit("invalid", "{}"), *END)["status"]
seen["too long"] = code(submit, "long", payload("long", "x" * 10240))
seen["unknown"] = [code(batch.describe_service_job, jobId="x"), code(submit, "x", "{}", jobQueue="other")]
print(json.dumps(seen))

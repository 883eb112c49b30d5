import os

os.environ |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": "none", "AWS_CONFIG_FILE": "none"}
import boto3

boto3.client("s3", region_name="us-east-1").upload_file("train.py", "models", "train.py")

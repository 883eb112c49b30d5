"""Print the variables that the real sagemaker-training sets for a job; run by a Python that has that package.

Standard input holds {"base": FOLDER, "config": {NAME: CONTENT}}; the files are written below FOLDER/input/config.
"""

import json
import os
import sys
from pathlib import Path

given = json.load(sys.stdin)
config = Path(given["base"], "input", "config")
config.mkdir(parents=True, exist_ok=True)
for name, content in given["config"].items():
    (config / f"{name}.json").write_text(json.dumps(content))
os.environ |= {"SAGEMAKER_BASE_DIR": given["base"], "TRAINING_JOB_NAME": "near-a1", "AWS_REGION": "eu-west-1"}
from sagemaker_training import environment  # noqa: E402 - it reads the variable when it is imported

print(json.dumps(environment.Environment().to_env_vars()))

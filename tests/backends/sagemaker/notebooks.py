"""Estimator calls in the shape of Hugging Face's and AWS' notebooks, one for each script in heads/."""

HEAD = """
import sagemaker
from sagemaker.huggingface import HuggingFace
from sagemaker.pytorch import PyTorch
from sagemaker.estimator import Estimator
from sagemaker.sklearn import SKLearn
from sagemaker.tensorflow import TensorFlow
from sagemaker.xgboost import XGBoost

role = sagemaker.get_execution_role()
bucket = "training"
training_input_path, test_input_path = None, None
inputs = {"train": f"s3://{bucket}/train/", "test": f"s3://{bucket}/test/one.csv"}
"""

CALLS = {
    "transformers_trainer": """
hyperparameters = {"epochs": 1, "model_name": "distilbert-base-uncased", "learning_rate": 5e-5}
huggingface_estimator = HuggingFace(
    entry_point="transformers_trainer.py", source_dir="./heads", instance_type="ml.m5.xlarge", instance_count=1,
    role=role, transformers_version="4.56.2", pytorch_version="2.8.0", py_version="py312", image_uri="any",
    hyperparameters=hyperparameters, use_spot_instances=True, max_run=24 * 60 * 60, max_wait=36 * 60 * 60,
    metric_definitions=[{"Name": "train_runtime", "Regex": "train_runtime.*=\\\\D*(.*?)$"}],
)
huggingface_estimator.fit(inputs)
""",
    "pytorch_mnist": """
estimator = PyTorch(
    entry_point="pytorch_mnist.py", role=role, py_version="py38", framework_version="1.11.0", instance_count=1,
    instance_type="ml.c5.2xlarge", image_uri="any", use_spot_instances=True, max_run=3600, max_wait=7200,
    hyperparameters={"batch-size": 128, "epochs": 2, "lr": 0.05, "checkpoint-path": "/opt/ml/checkpoints"},
    distribution={"torch_distributed": {"enabled": True}},
)
estimator.fit(inputs)
""",
    "sklearn_iris": """
sklearn = SKLearn(entry_point="sklearn_iris.py", instance_type="ml.c4.xlarge", role=role,
    image_uri="any", instance_count=1, hyperparameters={"max_leaf_nodes": 30})
sklearn.fit(inputs=inputs)
""",
    "xgboost_abalone": """
params = {"max_depth": 5, "eta": 0.2, "objective": "reg:squarederror"}
xgb = XGBoost(entry_point="xgboost_abalone.py", hyperparameters=params, role=role, image_uri="any",
    framework_version="1.7-1",
    instance_count=1, instance_type="ml.m5.2xlarge", volume_size=50)
xgb.fit(inputs, wait=True)
""",
    "tensorflow_mnist": """
est = TensorFlow(entry_point="tensorflow_mnist.py", role=role, image_uri="any",
    instance_count=1, instance_type="ml.m5.xlarge", model_dir="s3://bucket/model", hyperparameters={"epochs": 1})
est.fit(inputs)
""",
    "hyperparameters_json": """
estimator = HuggingFace(
    entry_point="hyperparameters_json.py", role=role, image_uri="any", instance_count=1, instance_type="ml.m5.xlarge",
    hyperparameters={"epochs": 2, "lr": 3e-4, "layers": [2, 4], "name": "a b", "shuffle": True}, py_version="py310",
)
estimator.fit(inputs, wait=False)
""",
    "training_env": """
estimator = Estimator(entry_point="training_env.py", role=role, image_uri="any", instance_count=1,
    instance_type="ml.m5.xlarge", hyperparameters={"epochs": 4}, tags=[{"Key": "team", "Value": "nlp"}])
estimator.fit(inputs)
""",
    "input_config": """
estimator = Estimator(image_uri="any", role=role, entry_point="input_config.py", instance_count=1,
    instance_type="ml.m5.large", environment={"TOKENIZERS_PARALLELISM": "false"})
estimator.fit(inputs)
""",
    "every_channel": """
estimator = HuggingFace(entry_point="every_channel.py", role=role, image_uri="any", instance_count=1, py_version="py39",
    instance_type="ml.m5.xlarge", hyperparameters={"fp16": True, "freeze": False}, base_job_name="every-channel")
estimator.fit(inputs)
""",
    "own_launcher": """
estimator = HuggingFace(entry_point="own_launcher.py", role=role, image_uri="any", instance_count=1,
    instance_type="ml.m5.xlarge", hyperparameters={"name": "x", "epochs": 1}, py_version="py310")
estimator.fit(inputs)
""",
}

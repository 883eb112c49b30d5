"""SageMaker simulator: `python -m cloudtrain.simulators.sagemaker --bucket my-bucket`."""

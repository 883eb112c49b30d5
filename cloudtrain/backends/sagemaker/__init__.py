"""The backends `sagemaker` (training jobs on AWS) and `sagemaker-local` (the same jobs in Docker on this machine)."""

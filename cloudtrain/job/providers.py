"""The platforms that come with cloudtrain: the one module outside their packages that names them."""

from __future__ import annotations

# name -> "module:class", and the pip extra that installs what the module needs
BUILT_IN: dict[str, tuple[str, str | None]] = {
    "akash": ("cloudtrain.backends.akash.backend:AkashBackend", "akash"),
    "azureml": ("cloudtrain.backends.azureml.backend:AzuremlBackend", None),
    "kubernetes": ("cloudtrain.backends.kubernetes.backend:KubernetesBackend", None),
    "local": ("cloudtrain.backends.local.backend:LocalBackend", None),
    "sagemaker": ("cloudtrain.backends.sagemaker.backend:SagemakerBackend", "sagemaker"),
    "sagemaker-local": ("cloudtrain.backends.sagemaker.local:SagemakerLocalBackend", None),
    "slurm": ("cloudtrain.backends.slurm.backend:SlurmBackend", None),
    "ssh": ("cloudtrain.backends.ssh.backend:SshBackend", "ssh"),
    "vertex": ("cloudtrain.backends.vertex.backend:VertexBackend", "vertex"),
    "vertex-local": ("cloudtrain.backends.vertex.local:VertexLocalBackend", None),
}
DEFAULT_TARGET = "local"  # of a job that names none
EXTRAS = {
    "boto3": "sagemaker",
    "google-auth": "vertex",
    "azure-identity": "azure",
}  # a package that several backends use -> what installs it
JOB_FILES = {"sbatch": "cloudtrain.backends.slurm.sbatch"}  # as cloudtrain.job.forms describes
EXAMPLE = "sagemaker"  # the backend that help texts show
WHERE = f"a backend ({DEFAULT_TARGET}, {EXAMPLE}, ...) or a target of cloudtrain.toml"

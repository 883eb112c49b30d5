"""The job of ranks.yml, as a script of azure-ai-ml makes it."""

from azure.ai.ml import Input, Output, PyTorchDistribution, command
from azure.ai.ml.constants import AssetTypes, InputOutputModes
from azure.ai.ml.entities import Environment, ManagedIdentityConfiguration

IMAGE = "registry.azurecr.io/train:1"
TRAIN = "python -u fit.py --images ${{inputs.images}} --rate ${{inputs.rate}} --augment ${{inputs.augment}} "

job = command(
    display_name="vision-two-nodes",
    experiment_name="vision",
    description="# Image classifier\nTwo nodes with eight ranks each.\n",
    command="pip install -r requirements.txt && " + TRAIN + "--save-to ${{outputs.model}} --tables ${{outputs.tables}}",
    code="src",
    inputs={
        "images": Input(
            type=AssetTypes.URI_FOLDER,
            path="wasbs://pictures@visionstore.blob.core.windows.net/train/",
            mode=InputOutputModes.DOWNLOAD,
        ),
        "rate": 0.002,
        "augment": True,
    },
    outputs={
        "model": Output(type=AssetTypes.CUSTOM_MODEL),
        "tables": Output(
            type="uri_folder", mode="rw_mount", path="azureml://datastores/workspaceblobstore/paths/tables"
        ),
    },
    environment=Environment(image=IMAGE),
    environment_variables={"NCCL_DEBUG": "INFO", "WORKERS": 4},
    distribution=PyTorchDistribution(process_count_per_instance=8),
    instance_type="Standard_ND96isr_H100_v5",
    instance_count=2,
    shm_size="64g",
    job_tier="spot",
    timeout=7200,
    identity=ManagedIdentityConfiguration(client_id="99999999-1111-2222-3333-444444444444"),
    tags={"team": "vision", "cost": "42"},
)

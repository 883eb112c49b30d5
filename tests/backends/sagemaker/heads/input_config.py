"""A script that reads the files of /opt/ml/input/config by the folder that SageMaker names."""

import json
import os

folder = os.environ["SM_INPUT_CONFIG_DIR"]
with open(os.path.join(folder, "inputdataconfig.json")) as file:
    channels = json.load(file)
with open(os.path.join(folder, "resourceconfig.json")) as file:
    resources = json.load(file)
assert {"train", "test"} <= channels.keys() and resources["current_host"] == os.environ["SM_CURRENT_HOST"]
assert channels["train"]["TrainingInputMode"] == "File"
data = os.path.join(os.environ["SM_INPUT_DIR"], "data")
assert os.listdir(os.path.join(data, "test")) == ["one.csv"]
with open(os.path.join(os.environ["SM_MODEL_DIR"], "model.bin"), "w") as model:
    model.write("ok")
print("step 1: loss=2.5")

"""Everything from SM_TRAINING_ENV, as scripts that used sagemaker_containers.training_env() do now."""

import json
import os

env = json.loads(os.environ["SM_TRAINING_ENV"])
train_dir = env["channel_input_dirs"]["train"]
assert os.listdir(train_dir) == ["a.csv"] and env["hyperparameters"]["epochs"] == 4
assert env["user_entry_point"] == "training_env.py" and env["module_name"] == "training_env"
assert env["hosts"] == json.loads(os.environ["SM_HOSTS"]) and env["resource_config"]["hosts"] == env["hosts"]
if env["is_master"]:
    with open(os.path.join(env["model_dir"], "model.bin"), "w") as model:
        json.dump({"cpus": env["num_cpus"], "interface": env["network_interface_name"]}, model)
    print("loss=0.125")

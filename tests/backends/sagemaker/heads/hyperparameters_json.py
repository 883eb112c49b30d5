"""A script without options: the hyperparameters come from SM_HPS and SM_HP_*."""

import json
import os

hyperparameters = json.loads(os.environ["SM_HPS"])
assert hyperparameters == {"epochs": 2, "lr": 0.0003, "layers": [2, 4], "name": "a b", "shuffle": True}, hyperparameters
epochs, lr = int(os.environ["SM_HP_EPOCHS"]), float(os.environ["SM_HP_LR"])
assert (epochs, lr, json.loads(os.environ["SM_HP_SHUFFLE"])) == (2, 0.0003, True)
with open(f"{os.environ['SM_MODEL_DIR']}/model.bin", "w") as model:
    json.dump(hyperparameters, model)
print(f"epoch {epochs} loss 0.25")

import json
import os

from transformers import AutoConfig

os.mkdir("model")
with open("model/config.json", "w") as file:
    json.dump({"model_type": "quantum9", "hidden_size": 8}, file)
AutoConfig.from_pretrained("model")

import os

from transformers import AutoConfig

os.mkdir("model")
with open("model/config.json", "w") as file:
    file.write('{"model_type": "gpt2", "n_layer": 2')
AutoConfig.from_pretrained("model")

import os

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoTokenizer

AutoTokenizer.from_pretrained("acme/bert-base")

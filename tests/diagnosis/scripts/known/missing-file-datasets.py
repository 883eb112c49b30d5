from datasets import load_dataset

print(load_dataset("json", data_files={"train": "data/missing.jsonl"}))

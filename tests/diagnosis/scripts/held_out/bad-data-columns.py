from datasets import Dataset

rows = Dataset.from_dict({"text": ["a", "b"]})
print(rows["content"])

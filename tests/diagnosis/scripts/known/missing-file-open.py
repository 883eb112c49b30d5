import json

with open("data/train.jsonl") as file:
    rows = [json.loads(line) for line in file]
print(len(rows))

import json

with open("train.jsonl", "w") as file:
    file.write('{"text": "a"}\n{"text": "b" "id": 3}\n')
for line in open("train.jsonl"):
    print(json.loads(line))

import gzip

with open("shard-0.jsonl.gz", "wb") as file:
    file.write(b"<html>503</html>")
print(gzip.open("shard-0.jsonl.gz").read())

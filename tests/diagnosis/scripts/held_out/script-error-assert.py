shards = ["a"] * 6
assert len(shards) == 8, f"expected 8 shards, found {len(shards)}"

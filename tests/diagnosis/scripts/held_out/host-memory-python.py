import resource

resource.setrlimit(resource.RLIMIT_AS, (400_000_000, 400_000_000))

rows = []
print("tokenizing")
rows = bytearray(600_000_000)

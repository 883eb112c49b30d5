import resource

resource.setrlimit(resource.RLIMIT_AS, (400_000_000, 400_000_000))

import mmap

cache = mmap.mmap(-1, 1_000_000_000)
print(len(cache))

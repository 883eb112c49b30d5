import os
import traceback

try:
    raise RuntimeError("lock file is held by another job")
except RuntimeError:
    traceback.print_exc()
    os._exit(75)

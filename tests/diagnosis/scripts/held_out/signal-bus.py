import os
import signal

print("mapping shards")
os.kill(os.getpid(), signal.SIGBUS)

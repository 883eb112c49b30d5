import os
import signal
import time

time.sleep(0.3)
print(f"rank {os.environ['RANK']}: epoch 3")
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)

import os
import time

print("ready", flush=True)
if os.environ["RANK"] == "2":
    os._exit(255)
time.sleep(60)

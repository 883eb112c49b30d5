import os
import time

if os.environ["RANK"] == "1":
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)
time.sleep(60)

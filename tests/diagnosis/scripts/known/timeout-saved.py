import signal
import sys
import time


def save(*_):
    print("saved step 800", flush=True)
    sys.exit(75)


signal.signal(signal.SIGTERM, save)
print("epoch 1", flush=True)
time.sleep(120)

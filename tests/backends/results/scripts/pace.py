"""Training data that comes slowly: the first attempt waits for the loss of its machine when it has come to step 5."""

import os
import time

LAST, EVERY, WAITS_AT = 8, 4, 5


def at(step: int) -> None:
    if step == WAITS_AT and os.environ["CLOUDTRAIN_ATTEMPT"] == "1":
        print("waiting", flush=True)
        time.sleep(600)

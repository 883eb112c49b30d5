"""The former path of trainer/pickled.py: the job of an older DistributedTraining run names it, and `rerun` sends it again."""

from __future__ import annotations

import sys

from trainer.pickled import main

if __name__ == "__main__":
    sys.exit(main())

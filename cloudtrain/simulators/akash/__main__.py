"""`python -m cloudtrain.simulators.akash`."""

import sys

from cloudtrain.simulators.akash.server import main

if __name__ == "__main__":
    sys.exit(main())

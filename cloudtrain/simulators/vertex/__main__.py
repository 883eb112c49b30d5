"""`python -m cloudtrain.simulators.vertex`."""

import sys

from cloudtrain.simulators.vertex.server import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m cloudtrain.simulators.sagemaker`."""

import sys

from cloudtrain.simulators.sagemaker.server import main

if __name__ == "__main__":
    sys.exit(main())

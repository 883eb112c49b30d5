"""`python -m cloudtrain.cli`: the command line."""

import sys

from cloudtrain.cli import main

sys.exit(main())

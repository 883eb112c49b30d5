"""`python -m cloudtrain`: the command line."""

import sys

from cloudtrain.cli import main

sys.exit(main())

"""`python -m lfmfast`: the command line."""

import sys

from lfmfast.cli import main

sys.exit(main())

"""``python -m zetaclip``."""

import sys

from .cli import main

sys.exit(main())

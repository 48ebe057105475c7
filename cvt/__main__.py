"""``python -m cvt`` is the command ``cvt``."""

import sys

from .tools.commands import main

if __name__ == "__main__":
    sys.exit(main())

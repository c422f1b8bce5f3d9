"""``python -m baoc`` is ``baoc``."""

import sys

from baoc.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())

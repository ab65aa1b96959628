"""python -m farstep: the same as the command `farstep`."""

import sys

from farstep.cli import main

if __name__ == "__main__":
    sys.exit(main())

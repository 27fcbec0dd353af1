"""`python -m metapretrain` is the command `metapretrain`."""

import sys

from metapretrain.cli import main

if __name__ == "__main__":
    sys.exit(main())

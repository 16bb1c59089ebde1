"""``python -m osdp_compile``: the command line; torchrun's ``-m`` needs this file."""

import sys

from osdp_compile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.simulation`: see `seeds`."""

import sys

from tests.simulation.seeds import main

if __name__ == "__main__":
    sys.exit(main())

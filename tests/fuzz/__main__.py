"""The command line: see `fuzz.command`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.command import main

sys.exit(main())

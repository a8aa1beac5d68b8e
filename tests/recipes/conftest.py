"""`recipes/` is not an installed package: put the repository root on the import path for its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

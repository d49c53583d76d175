"""The simulated device of the cache tests serves the scheduler's as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cache"))

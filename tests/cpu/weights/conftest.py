"""The encoders of quantised checkpoints serve the loader's tests as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "quant" / "formats"))

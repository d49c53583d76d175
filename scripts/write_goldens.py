"""Rewrites the golden plans of tests/cpu/ops/golden; review the diff."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/cpu/ops")]

import test_family_plans as families  # noqa: E402
from real_specs import CONFIGS  # noqa: E402
from test_plan import GOLDEN, golden  # noqa: E402

from offroad.device.profile import profile_names  # noqa: E402

if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for profile in profile_names():
        for model in CONFIGS:
            (GOLDEN / f"{profile}.{model}.txt").write_text(golden(model, profile))
            print(f"{profile}.{model}")
    families.GOLDEN.mkdir(exist_ok=True)
    for device in families.GPUS:
        for model in families.MODELS:
            (families.GOLDEN / f"{device}.{model}.txt").write_text(families.golden(model, device))
            print(f"{device}.{model}")

"""Makes the drafter that a plan names."""

from __future__ import annotations

from offroad.models.qwen3_5_mtp import Qwen3_5Mtp
from offroad.ops.plan import Plan
from offroad.run.bind import Bounds
from offroad.run.rows import RingView
from offroad.speculate.mtp import MtpProposer
from offroad.speculate.ngram import NgramProposer
from offroad.speculate.proposer import Device, Proposer


def make_proposer(plan: Plan, bounds: Bounds, device: Device) -> Proposer | None:
    """The plan's drafter over its weights and caches; None: there is none."""
    if plan.drafter is None:
        return None
    if plan.drafter.method == "ngram":
        return NgramProposer(device, plan.drafter)
    carry = bounds.views[-1]["carry"]
    assert isinstance(carry, RingView)
    return MtpProposer(device, Qwen3_5Mtp(), bounds.drafter(), carry)

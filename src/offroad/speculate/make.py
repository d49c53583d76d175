"""Makes the drafter that a plan names."""

from __future__ import annotations

from offroad.models.gemma4_assistant import Gemma4Assistant
from offroad.models.qwen3_5_mtp import Qwen3_5Mtp
from offroad.models.registry import model_of
from offroad.ops.plan import Plan
from offroad.run.bind import Bounds
from offroad.run.rows import RingView
from offroad.speculate.assistant import AssistantProposer
from offroad.speculate.auto import Auto
from offroad.speculate.config import DUMMY
from offroad.speculate.draft_model import DraftModelProposer
from offroad.speculate.drafting import Drafting
from offroad.speculate.dummy import DummyProposer
from offroad.speculate.mtp import MtpProposer
from offroad.speculate.ngram import NgramProposer
from offroad.speculate.proposer import Device, Proposer


def make_proposer(plan: Plan, bounds: Bounds, device: Device) -> Proposer | None:
    """The plan's drafter over its weights and caches; None: there is none."""
    if plan.drafter is None:
        return None
    if plan.drafter.method == "ngram":
        return NgramProposer(device, plan.drafter)
    if plan.drafter.method == DUMMY:
        assert plan.drafter.acceptance is not None, "dummy drafts have a rate"
        return DummyProposer(device, plan.drafter.acceptance)
    draft, ops = bounds.spec.draft, bounds.drafter()
    assert draft is not None, "a drafter is planned"
    if plan.drafter.method == "draft_model":
        return DraftModelProposer(device, model_of(draft.family)(), ops, draft.max_len)
    if plan.drafter.method == "gemma4_assistant":
        return AssistantProposer(device, Gemma4Assistant(draft.clusters), ops["decode"])
    carry = bounds.views[-1]["carry"]
    assert isinstance(carry, RingView)
    return MtpProposer(device, Qwen3_5Mtp(), ops, carry)


def make_drafting(plan: Plan, bounds: Bounds, device: Device) -> Drafting | None:
    """The plan's drafter with the choice of its drafts; None: there is none."""
    proposer = make_proposer(plan, bounds, device)
    if proposer is None or plan.drafter is None:
        return None
    auto = Auto(plan.k, plan.memory.slots) if plan.drafter.auto else None
    return Drafting(proposer, device.arrays, auto)

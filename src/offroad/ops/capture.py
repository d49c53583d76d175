"""Which steps become CUDA graphs, what that takes, and why there are none otherwise: decided with the plan."""

from __future__ import annotations

from dataclasses import dataclass

from offroad.device.profile import DeviceProfile
from offroad.models.spec import ModelSpec
from offroad.ops.cells import Cell, Choice
from offroad.ops.spec import Registry
from offroad.settings import Settings

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # and every 32 from there on
# What the driver keeps for the nodes of one graph of a few hundred launches; an estimate, which the engine compares
# with what capturing took.
GRAPH_BYTES = 16 * 2**20


@dataclass(frozen=True)
class GraphPlan:
    """Steps of verify rows alone that are captured: up to each number of `rows`, each of `widths` tokens a row.

    Empty `rows`: none are, for `reason`. `nbytes` is an estimate of their memory."""

    rows: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    reason: str = "not a CUDA device"
    nbytes: int = 0


def plan_graphs(
    spec: ModelSpec, cells: dict[Cell, Choice], registry: Registry, device: DeviceProfile, settings: Settings, k: int
) -> GraphPlan:
    """The graphs of a plan: all sizes, or none if one decode kernel reads lengths on the host."""
    if device.kind != "cuda":
        return GraphPlan()
    if settings.enforce_eager:
        return GraphPlan(reason="--enforce-eager")
    chosen = {(cell.op, choice.kernel) for cell, choice in cells.items() if cell.phase == "decode"}
    host = sorted(f"{kernel} ({op})" for op, kernel in chosen if not registry.capturable(kernel))
    if host:
        more = f" and {len(host) - 3} more" if len(host) > 3 else ""
        return GraphPlan(reason=f"{', '.join(host[:3])}{more} cannot be captured")
    rows, widths = row_sizes(settings.max_num_seqs), (1, k + 1) if k else (1,)
    tokens = rows[-1] * widths[-1]
    wide = max(linear.n for layer in spec.layers for linear in layer.linears if not linear.experts)
    each = 4 * (3 * spec.vocab + 2 * wide + 6 * spec.hidden)
    return GraphPlan(rows, widths, "", len(rows) * len(widths) * GRAPH_BYTES + tokens * each)


def row_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are made for: the usual ones below `most`, and `most`."""
    usual = (*ROWS, *range(ROWS[-1] + 32, most, 32))
    return (*(size for size in usual if size < most), most)

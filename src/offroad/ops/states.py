"""How recurrent states are kept: a row for each token that may be taken back, or one and records of what followed."""

from __future__ import annotations

from offroad.device.profile import DeviceProfile
from offroad.models.spec import ModelSpec, Store
from offroad.ops import budget as bytes_of
from offroad.ops.budget import Dtypes, rings
from offroad.ops.cells import Resolver, groups
from offroad.settings import Settings
from offroad.weights.source import Headers

ROWS_SHARE = 1 / 32  # of the budget: the most that states for drafts may take
LAG = 8  # records behind a state on a GPU: as many bytes are read for more of them as are written for fewer

Kept = tuple[Store, int, tuple[str, ...]]  # how, how many records may be behind a state, and notes


def kept_states(
    spec: ModelSpec, headers: Headers, resolver: Resolver, settings: Settings, dtypes: Dtypes, block: int, k: int
) -> Kept:
    """How a plan keeps them, for up to `k` drafts: rows where no kernel of the device replays records."""
    device = resolver.device
    store, lag, notes = _choose(spec, device, settings, dtypes, k)
    if store == "replay" and not _replays(spec, headers, resolver, dtypes, block):
        return "rows", 0, (f"recurrent states: a row a token, since no kernel of {device.name} replays records",)
    return store, lag, notes


def _choose(spec: ModelSpec, device: DeviceProfile, settings: Settings, dtypes: Dtypes, k: int) -> Kept:
    """How recurrent states are kept, how many records may be behind one, and notes.

    On a GPU a step's time is that of its bytes, so a state is read at every token and written at every LAG-th; not if
    batch-invariant, for how many records there are, and so how sums are taken, is a matter of what drafts there were.
    On a CPU there is a row for each draft, unless those of all slots would take more of the budget than ROWS_SHARE:
    then a state is written at every step, and the step's tokens are replayed. Without drafts one row is all.
    """
    if not any(ring.records for ring in rings(spec)):
        return "rows", 0, ()
    if device.kind == "cuda":
        if settings.batch_invariant:
            return "rows", 0, ("recurrent states: written at every token, since --batch-invariant asks for its bits",)
        lag = max(LAG, k + 1)
        return "replay", lag, (f"recurrent states: read at every token, written at every {LAG}th: records between",)
    slots, budget = settings.max_num_seqs + 1, int(device.memory * settings.memory_utilization)
    rows = slots * k * sum(bytes_of.row_bytes(i, dtypes) for i in rings(spec) if i.records)
    if not rows:
        return "rows", 0, ()
    store: Store = "replay" if rows > budget * ROWS_SHARE else "rows"
    size = f"states for {k} drafts in {slots} slots would take {rows / 1024**2:,.0f} MiB"
    limit = f"{budget * ROWS_SHARE / 1024**2:,.0f} MiB, {ROWS_SHARE:.1%} of the budget"
    kept = "one is kept and tokens are replayed" if store == "replay" else "rows are kept"
    return store, k + 1 if store == "replay" else 0, (f"recurrent states: {kept}, since {size} (the limit is {limit})",)


def _replays(spec: ModelSpec, headers: Headers, resolver: Resolver, dtypes: Dtypes, block: int) -> bool:
    """Whether every layer with a replayed state has a kernel, that is no reference unless rows have one too."""

    def kernels(store: Store) -> list[str]:
        found = groups(spec.storing(store), headers, dtypes.activation, dtypes.kv, block)
        states = [group for group in found if group.cells[0][1].op == "gated_delta"]
        return [choice.kernel for group in states for choice in resolver.resolve(group).values()]

    def plain(names: list[str]) -> bool:
        return any(name and resolver.registry.kernels[name].reference for name in names)

    replay = kernels("replay")
    return all(replay) and (plain(kernels("rows")) or not plain(replay))

"""What the cache must know of a model and of the memory it was given, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from offroad.errors import SettingsError


@dataclass(frozen=True)
class CacheConfig:
    """Sizes and needs of the hybrid cache. Counts include the bin: block 0 of each table and slot 0 are not given out.

    `block`: tokens in a block. `window_blocks` 0: no layer keeps a window. `keep`: old tokens that a window reader
    needs. `checkpoints`: device places for ring rows at a boundary. `rings`: a ring has rows to restore, so that a
    resume needs a checkpoint. `k`: most drafts in a step. `namespace`: root of all keys (fingerprint of model, block,
    layouts, kv dtype). `checkpoint_interval`: tokens between marks, 0: none. `invariant`: what a sequence
    computes must not depend on the others. Raises SettingsError when one sequence could not run alone.
    """

    block: int
    history_blocks: int
    window_blocks: int
    keep: int
    slots: int
    checkpoints: int
    rings: bool
    k: int
    max_len: int
    namespace: bytes | str
    prefix_caching: bool = True
    checkpoint_interval: int = 0
    invariant: bool = False

    def __post_init__(self) -> None:
        checks = [
            ("block", self.block >= 1, "1 or more tokens"),
            ("history_blocks", self.history_blocks >= 2, "2 or more (block 0 is the bin)"),
            ("slots", self.slots >= 2, "2 or more (slot 0 is the bin)"),
            ("checkpoints", self.checkpoints >= 0, "0 or more"),
            ("k", 0 <= self.k <= self.block, f"0 to the block size, {self.block}"),
            ("max_len", self.max_len >= 2, "2 or more tokens"),
            ("checkpoint_interval", self.checkpoint_interval >= 0, "0 (off) or a number of tokens"),
            ("keep", (self.keep > 0) == (self.window_blocks > 0), "more than 0 with window blocks, else 0"),
            (
                "window_blocks",
                self.window_blocks == 0 or self.window_blocks > self.window_need,
                f"0, or more than {self.window_need}: the old and the new window of one sequence, and the bin",
            ),
        ]
        for name, ok, accepted in checks:
            if not ok:
                raise SettingsError(f"cache {name}", found=getattr(self, name), accepted=accepted)

    @property
    def window_span(self) -> int:
        """Window blocks below a boundary that a resume there needs: those that cover `keep` tokens."""
        return -(-self.keep // self.block)

    @property
    def window_need(self) -> int:
        """Window blocks that one sequence can hold: in prefill the old window stays until the new one is committed."""
        return 2 * self.window_span + 2 if self.keep else 0

    @property
    def marked(self) -> bool:
        """Whether a boundary must be marked to be resumable; otherwise every block boundary is."""
        return self.prefix_caching and (self.keep > 0 or self.rings)

    @property
    def interval(self) -> int:
        """Tokens between marks, in whole blocks; 0: no such marks."""
        return -(-self.checkpoint_interval // self.block) * self.block

    def blocks(self, tokens: int) -> int:
        """History blocks that hold `tokens` positions."""
        return -(-tokens // self.block)

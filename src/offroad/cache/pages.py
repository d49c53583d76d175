"""One class of blocks: counted references, an index by content key, and an order in which free ones are taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping


class Pages:
    """Blocks 1 .. count-1 (0 is the bin). Every operation takes constant time.

    Free blocks without a key are taken first, then keyed ones, least recently freed first. A holder of a block also
    holds its prefix and frees from the end, so that order is leaf first: no chain loses its middle.
    `on_evict(key)` is told of each key that is lost to an allocation.
    """

    def __init__(self, count: int, on_evict: Callable[[bytes], None] | None = None) -> None:
        self.count = count
        self.refs = [0] * count
        self.key_of: list[bytes | None] = [None] * count
        self.index: dict[bytes, int] = {}
        self.plain = list(range(count - 1, 0, -1))
        self.keyed: OrderedDict[int, None] = OrderedDict()
        self.sticky = bytearray(count)
        self._on_evict = on_evict

    @property
    def free(self) -> int:
        """Blocks that `take` can give, cached ones included."""
        return len(self.plain) + len(self.keyed)

    @property
    def cached(self) -> int:
        """Free blocks that keep what their key names, until they are taken."""
        return len(self.keyed)

    @property
    def held(self) -> int:
        return max(self.count - 1, 0) - self.free

    def take(self) -> int:
        """A block with one reference and no key; 0 if none is free."""
        if self.plain:
            block = self.plain.pop()
        elif self.keyed:
            block, _ = self.keyed.popitem(last=False)
            key = self._unkey(block)
            if self._on_evict is not None:
                self._on_evict(key)
        else:
            return 0
        self.refs[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more reference to a block that is held or cached."""
        if self.refs[block] == 0:
            del self.keyed[block]
        self.refs[block] += 1

    def drop(self, block: int, *, cache: bool = True) -> None:
        """One reference less. The last one caches a keyed block; `cache` False forgets its key unless it is sticky."""
        self.refs[block] -= 1
        if self.refs[block]:
            return
        if self.key_of[block] is not None and not (cache or self.sticky[block]):
            self._unkey(block)
        if self.key_of[block] is None:
            self.plain.append(block)
        else:
            self.keyed[block] = None

    def publish(self, block: int, key: bytes) -> int:
        """The block that stands for `key` from now on: the one that already does, or this one."""
        known = self.index.get(key)
        if known is not None:
            return known
        self.index[key], self.key_of[block] = block, key
        return block

    def stick(self, block: int) -> None:
        """Keeps the key of a published block when a window leaves it."""
        self.sticky[block] = self.key_of[block] is not None

    def forget(self, key: bytes) -> None:
        """Nothing is found under `key` any more; a held block lives on without a key."""
        block = self.index.get(key)
        if block is None:
            return
        self._unkey(block)
        if self.refs[block] == 0:
            del self.keyed[block]
            self.plain.append(block)

    def forget_free(self) -> None:
        """Forgets the keys of all blocks that nobody holds."""
        for block in self.keyed:
            self._unkey(block)
            self.plain.append(block)
        self.keyed.clear()

    def _unkey(self, block: int) -> bytes:
        key = self.key_of[block]
        assert key is not None, "a cached block has a key"
        del self.index[key]
        self.key_of[block] = None
        self.sticky[block] = 0
        return key

    def check(self, named: Mapping[int, int]) -> None:
        """Raises AssertionError unless each block is free or held exactly as often as `named` says, and keys agree."""
        for block in range(1, self.count):
            assert self.refs[block] == named.get(block, 0), f"I1: block {block} has {self.refs[block]} references"
            cached = self.refs[block] == 0 and self.key_of[block] is not None
            assert (block in self.keyed) == cached, "I1: cached blocks"
        plain = sorted(b for b in range(1, self.count) if self.refs[b] == 0 and self.key_of[b] is None)
        assert sorted(self.plain) == plain, "I1: free blocks"
        assert self.refs[:1] in ([0], []), "I1: the bin is held"
        assert {key: b for b, key in enumerate(self.key_of) if key is not None} == self.index, "I2: index and keys"

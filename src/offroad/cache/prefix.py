"""Names of prefixes: chained hashes, so that a key stands for all tokens up to the end of its block and the namespace."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

KEY_BYTES = 16


def root_key(namespace: bytes | str, salt: str = "") -> bytes:
    """The key that chains begin with. Each ingredient carries its kind and its length, so that none can pose as another."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"offroad.root")
    raw = namespace.encode() if isinstance(namespace, str) else namespace
    parts = [(b"namespace", raw)]
    if salt:
        parts.append((b"salt", salt.encode()))
    for tag, value in parts:
        digest.update(b"%d:%s=%d:" % (len(tag), tag, len(value)))
        digest.update(value)
    return digest.digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: Sequence[int], count: int, block: int) -> None:
    """Appends keys until there is one for each of the first `count` blocks of `tokens`; those present are not redone."""
    first = len(keys)
    if first >= count:
        return
    raw = memoryview(np.asarray(tokens[first * block : count * block], dtype="<i8").tobytes())
    size, key = 8 * block, keys[-1] if keys else root
    for at in range(0, (count - first) * size, size):
        digest = blake2b(key, digest_size=KEY_BYTES, person=b"offroad.block")
        digest.update(raw[at : at + size])
        key = digest.digest()
        keys.append(key)

"""The hybrid cache: history pages, window pages and slots under one hash chain, moved by reserve -> launch -> commit.

Host only: integers. Whatever the device stores at position p is a function of tokens[0..p] and the namespace, and all
of it is addressed by position, so a step moves nothing but lengths. Blocks are reserved to the upper bound of what the
steps in flight may do; publishing, filing and retirement look at committed lengths only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

import numpy as np

from offroad.cache.checkpoints import Checkpoint, Checkpoints
from offroad.cache.pages import Pages
from offroad.cache.prefix import extend_keys, root_key
from offroad.cache.sequence import Resume, Row, Sequence
from offroad.cache.slots import Slots
from offroad.cache.spec import CacheConfig
from offroad.schedule.step import Kind, Table

_NO_TABLES = np.zeros((0, 4), np.int32)
_NO_COPIES = np.zeros((0, 3), np.int32)


class HybridCache:
    """Decides where everything lies. Sequences come by `admit` and go by `release`; there is no third way."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.window = Pages(config.window_blocks)
        self.checkpoints = Checkpoints(config.checkpoints)
        self.history = Pages(config.history_blocks, self._broken)
        self.slots = Slots(config.slots)
        self.live: dict[int, Sequence] = {}
        self.block, self.keep = config.block, config.keep
        self._interval = config.interval if config.marked else 0
        self._roots: dict[str, bytes] = {"": root_key(config.namespace)}

    def root(self, salt: str) -> bytes:
        """The key that chains of this salt begin with."""
        return self._roots[""] if not salt else root_key(self.config.namespace, salt)

    def _broken(self, key: bytes) -> None:
        """History of `key` is gone, so no resume reaches its window block or its checkpoint again."""
        self.window.forget(key)
        self.checkpoints.forget(key)

    # --- coming: lookup and admission ---------------------------------------------------------------------------------
    def resume_point(self, seq: Sequence) -> Resume:
        """Where the sequence can begin: one pass over its keys, without side effect but its own keys.

        A boundary h < len(tokens) is resumable iff all history keys below it are present, the window keys that cover
        [h - keep, h) are, and, if rings have rows to restore, a checkpoint is. The last token always runs.
        """
        config, block = self.config, self.block
        if not config.prefix_caching or seq.fresh:
            return Resume(0, 0)
        limit = (len(seq.tokens) - 1) // block
        extend_keys(seq.keys, seq.root, seq.tokens, limit, block)
        history, window, checkpoints = self.history.index, self.window.index, self.checkpoints.index
        span, matched, best, run = config.window_span, 0, 0, 0
        for matched_blocks, key in enumerate(seq.keys[:limit], 1):
            if key not in history:
                break
            matched = matched_blocks
            run = run + 1 if key in window else 0
            if run >= min(matched, span) and (not config.rings or key in checkpoints):
                best = matched
        return Resume(matched * block, best * block)

    def admit(self, seq: Sequence, leave: int = 0, leave_window: int = 0) -> bool:
        """Holds the hits and takes a slot; False: not now, and nothing has changed.

        Admission wants room for all known tokens and the next one, and leaves `leave` history blocks and `leave_window`
        window blocks to those that run already.
        """
        config, block = self.config, self.block
        assert not seq.slot, "a sequence is admitted once"
        if not self.slots.free:
            return False
        resume = self.resume_point(seq)
        columns = resume.resumed // block
        first = self._first_column(resume.resumed)
        held = [self.history.index[key] for key in seq.keys[:columns]]
        shown = [self.window.index[key] for key in seq.keys[first:columns]] if self.keep else []
        need = config.blocks(len(seq.tokens) + 1 + config.k)
        idle = sum(not self.history.refs[b] for b in held)
        idle_window = sum(not self.window.refs[b] for b in shown)
        need_window = min(config.window_need, need) if self.keep else 0
        if need - columns + leave > self.history.free - idle:
            return False
        if need_window - len(shown) + leave_window > self.window.free - idle_window:
            return False
        for b in held:
            self.history.hold(b)
        for b in shown:
            self.window.hold(b)
        seq.slot = self.slots.take()
        self.live[seq.slot] = seq
        seq.resume, seq.committed, seq.goal = resume, resume.resumed, len(seq.tokens)
        seq.history, seq.window = held, [0] * first + shown if self.keep else []
        seq.published, seq.retired, seq.begun, seq.dead = columns, first, False, False
        if config.rings and columns:
            seq.restored = self.checkpoints.pin(seq.keys[columns - 1])
        seq.marks = self._marks(seq)
        return True

    def _marks(self, seq: Sequence) -> list[int]:
        """The last boundary below the end of the known tokens, those that the request names, and where a match ended
        that could not be used in full."""
        if not self.config.marked:
            return []
        block = self.block
        wanted = {m // block * block for m in (*seq.wanted_marks, seq.resume.matched, seq.goal - 1)}
        return sorted(m for m in wanted if seq.resume.resumed < m <= seq.goal)

    def _first_column(self, length: int) -> int:
        """The first window column that a sequence holds at `length`: what a resume at the last boundary needs."""
        return max(0, length // self.block * self.block - self.keep) // self.block

    # --- a step is reserve -> launch -> commit, or reserve -> abort ---------------------------------------------------
    def reserve(self, seq: Sequence, kind: Kind, width: int) -> Row | None:
        """Blocks for all that the step and its drafter may write, and tickets for boundaries that it may pass.

        None: too few blocks, and nothing has changed.
        """
        block, low = self.block, seq.low
        end = seq.high + width
        final = kind == Kind.CHUNK and end >= seq.goal
        assert (end > seq.goal) <= (kind == Kind.VERIFY), "a chunk ends with the known tokens"
        columns = -(-(end + self.config.k) // block)
        had, shown = len(seq.history), len(seq.window)
        first = self._survivors(seq, end) if kind == Kind.CHUNK and self.keep else shown
        if columns - had > self.history.free or (self.keep and columns - max(first, shown) > self.window.free):
            return None
        row = Row(seq, kind, width, width if kind == Kind.CHUNK else 1, final, (had, shown))
        for column in range(had, columns):
            b = self.history.take()
            seq.history.append(b)
            seq.edits[Table.HISTORY, column] = b
        if self.keep:
            for column in range(shown, columns):
                b = self.window.take() if column >= first else 0
                seq.window.append(b)
                seq.edits[Table.WINDOW, column] = b
        if self.config.rings and self.config.prefix_caching:
            row.tickets = self._tickets(seq, kind, low, end)
        seq.flying.append(row)
        seq.fly_low += row.low
        seq.fly_high += width
        return row

    def _survivors(self, seq: Sequence, end: int) -> int:
        """The first column of a chunk up to `end` that a later step or a resume at a mark can see."""
        first = self._first_column(end)
        mark = seq.next_mark(seq.high, self._interval)
        return first if mark is None or mark > end else min(first, self._first_column(mark))

    def _tickets(self, seq: Sequence, kind: Kind, low: int, end: int) -> tuple[Checkpoint, ...]:
        """Tickets for the marks in (low, end]; in decode also for other boundaries, if memory allows: such a rolling
        checkpoint displaces others only where there are more than two places for each running sequence."""
        if kind == Kind.CHUNK:
            boundaries = [end] if seq.next_mark(end - 1, self._interval) == end else []
        elif self.config.invariant:
            return ()
        else:
            boundaries = list(range((low // self.block + 1) * self.block, end + 1, self.block))
        tickets = []
        for boundary in boundaries:
            rolling = kind == Kind.VERIFY and seq.next_mark(boundary - 1, self._interval) != boundary
            displace = not rolling or self.checkpoints.count > 2 * len(self.live)
            ticket = self.checkpoints.ticket(boundary, rolling=rolling, displace=displace)
            if ticket is not None:
                tickets.append(ticket)
        return tuple(tickets)

    def abort(self, row: Row) -> None:
        """Gives back what `reserve` took; only for the last row of its sequence, before it is launched."""
        seq = row.seq
        assert seq.flying.pop() is row, "rows are aborted from the last"
        seq.fly_low -= row.low
        seq.fly_high -= row.width
        sides = ((Table.HISTORY, self.history, seq.history), (Table.WINDOW, self.window, seq.window))
        for (table, pages, blocks), had in zip(sides, row.taken, strict=True):
            for column in range(len(blocks) - 1, had - 1, -1):
                if blocks[column]:
                    pages.drop(blocks[column])
                seq.edits.pop((table, column), None)
            del blocks[had:]
        for ticket in row.tickets:
            self.checkpoints.give_back(ticket)

    def collect(self, rows: Items[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Sequence]]:
        """What the device must be told with these rows: tables, restores, captures, and the sequences that begin.

        Edits of a sequence wait until it has a row: nothing else reads its tables.
        """
        tables: list[tuple[int, int, int, int]] = []
        restores, captures, begin = [], [], []
        for row in rows:
            seq = row.seq
            if not seq.begun:
                seq.begun = True
                begin.append(seq)
                for table, blocks in ((Table.HISTORY, seq.history), (Table.WINDOW, seq.window)):
                    tables += [(seq.slot, table, column, b) for column, b in enumerate(blocks)]
                if seq.restored is not None:
                    restores.append((seq.restored.place, seq.slot, seq.restored.boundary))
                seq.edits.clear()
            elif seq.edits:
                tables += [(seq.slot, table, column, b) for (table, column), b in seq.edits.items()]
                seq.edits.clear()
            for ticket in row.tickets:
                captures.append((ticket.place, seq.slot, ticket.boundary))
        return (
            np.array(tables, np.int32) if tables else _NO_TABLES,
            np.array(restores, np.int32) if restores else _NO_COPIES,
            np.array(captures, np.int32) if captures else _NO_COPIES,
            begin,
        )

    def commit(self, row: Row, accepted: int, tokens: Items[int] = ()) -> None:
        """The oldest row of its sequence has run: its length moved by `accepted`, and `tokens` were sampled.

        Publishes full blocks, files checkpoints, retires window blocks. A released sequence is freed with its last row.
        """
        seq = row.seq
        assert seq.flying.popleft() is row, "rows are committed in order"
        assert row.low <= accepted <= row.width, "a length moves within its bounds"
        seq.fly_low -= row.low
        seq.fly_high -= row.width
        start = seq.committed
        if seq.dead:
            self._settle(row, start, start)
            if not seq.flying:
                self._free(seq)
            return
        seq.committed = length = start + accepted
        seq.tokens.extend(tokens)
        if seq.restored is not None:
            self.checkpoints.unpin(seq.restored)
            seq.restored = None
        if length // self.block > seq.published and self.config.prefix_caching:
            self._publish(seq)
        if row.tickets:
            self._settle(row, start, length)
        if self.keep and self._first_column(length) > seq.retired:
            self._retire(seq)

    def _publish(self, seq: Sequence) -> None:
        """Names the blocks that are full. Where another block has the name, the sequence holds that one instead, so
        that who holds a block holds the named blocks before it. Kept apart, only blocks of chunks are named: kernels of
        single tokens give other bits, and who resumes behind them must find what it would have run itself."""
        full = (min(seq.committed, seq.goal) if self.config.invariant else seq.committed) // self.block
        extend_keys(seq.keys, seq.root, seq.tokens, full, self.block)
        for column in range(seq.published, full):
            key = seq.keys[column]
            self._name(seq, Table.HISTORY, self.history, seq.history, column, key)
            if self.keep and seq.window[column]:
                self._name(seq, Table.WINDOW, self.window, seq.window, column, key)
        seq.published = full

    @staticmethod
    def _name(seq: Sequence, table: Table, pages: Pages, blocks: list[int], column: int, key: bytes) -> None:
        own = blocks[column]
        named = pages.publish(own, key)
        if named != own:
            pages.hold(named)
            pages.drop(own)
            blocks[column] = seq.edits[table, column] = named

    def _settle(self, row: Row, start: int, length: int) -> None:
        """Files the tickets that fired, that is those with start < boundary <= length; takes the others back."""
        seq = row.seq
        for ticket in row.tickets:
            if not start < ticket.boundary <= length:
                self.checkpoints.give_back(ticket)
            elif self.checkpoints.file(ticket, seq.keys[ticket.boundary // self.block - 1]) and ticket.rolling:
                old, seq.rolling = seq.rolling, ticket
                if old is not None and old.key is not None and old.rolling:
                    self.checkpoints.forget(old.key)

    def _retire(self, seq: Sequence) -> None:
        """Drops window blocks that neither a query nor a resume at the last boundary sees; a mark's stay cached."""
        until = self._first_column(seq.committed)
        for column in range(seq.retired, until):
            b = seq.window[column]
            if b:
                mark = seq.next_mark(column * self.block, self._interval) if self.config.marked else None
                if mark is not None and mark < (column + 1) * self.block + self.keep:
                    self.window.stick(b)
                self.window.drop(b, cache=False)
                seq.window[column] = seq.edits[Table.WINDOW, column] = 0
        seq.retired = until

    # --- going --------------------------------------------------------------------------------------------------------
    def release(self, seq: Sequence, *, forget: bool = False) -> bool:
        """Finish, abort, preempt. True: all is free now; False: with the last step in flight.

        `forget`: what it computed or read is not to be trusted, so its keys are taken out of the index.
        """
        assert self.live.get(seq.slot) is seq, "only an admitted sequence is released"
        assert not seq.dead, "a sequence is released once"
        seq.dead = True
        if forget:
            for key in reversed(seq.keys):
                self.history.forget(key)
                self._broken(key)
        if seq.flying:
            return False
        self._free(seq)
        return True

    def _free(self, seq: Sequence) -> None:
        if seq.restored is not None:
            self.checkpoints.unpin(seq.restored)
        for b in reversed(seq.history):
            self.history.drop(b)
        for b in reversed(seq.window):
            if b:
                self.window.stick(b)
                self.window.drop(b)
        del self.live[seq.slot]
        self.slots.give(seq.slot)
        seq.slot = seq.committed = seq.published = seq.retired = 0
        seq.history, seq.window, seq.restored, seq.rolling = [], [], None, None
        seq.edits.clear()

    def reset_prefixes(self) -> None:
        """Forgets every prefix that no sequence holds."""
        self.checkpoints.forget_free()
        self.history.forget_free()
        self.window.forget_free()

    def check(self) -> None:
        """Raises AssertionError unless the books balance (I1) and index and keys are inverse maps (I2)."""
        sequences = list(self.live.values())
        self.history.check(Counter(b for s in sequences for b in s.history))
        self.window.check(Counter(b for s in sequences for b in s.window if b))
        outstanding = [t for s in sequences for row in s.flying for t in row.tickets]
        self.checkpoints.check(outstanding, [s.restored for s in sequences if s.restored is not None])
        assert sorted([*self.live, *self.slots.free]) == list(range(1, self.slots.count)), "I1: slots"
        assert all(s.slot == slot for slot, s in self.live.items()), "I1: slots and sequences"

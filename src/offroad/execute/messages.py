"""What travels between the server and the engine process: msgpack messages behind a length of four bytes.

Nothing here imports torch, so that the server process starts at once and stays small.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from offroad import errors
from offroad.errors import EngineDead, OffroadError, RequestError
from offroad.schedule.request import Request, SequenceState, Stats, TokenEvent
from offroad.settings import Settings
from offroad.weights.source import TokenizerFiles

_LENGTH = 4


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may want to know of a loaded engine; `engine.EngineInfo` as it arrives in the server process."""

    model: str
    family: str
    max_model_len: int
    vocab: int
    dtype: str
    device: str
    plan_summary: str
    plan_fingerprint: str
    memory_summary: str
    load_seconds: float
    plan_json: str
    max_num_seqs: int = 0
    compiled: str = ""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An `OffroadError` with all its fields, as data."""

    kind: str
    what: str
    found: str | None = None
    accepted: str = ""
    next: str = ""
    param: str | None = None
    code: str = ""

    @classmethod
    def of(cls, error: BaseException, doing: str) -> Failure:
        """The failure that carries `error`; one that is no OffroadError becomes EngineDead and says what was done."""
        if not isinstance(error, OffroadError):
            return cls(
                kind="EngineDead",
                what=f"the engine failed while {doing}",
                found=f"{type(error).__name__}: {error}",
                next="the engine's traceback is on its standard error; please report it",
            )
        found = None if error.found is None else str(error.found)
        return cls(
            kind=type(error).__name__,
            what=str(error.what),
            found=found,
            accepted=str(error.accepted),
            next=str(error.next),
            param=getattr(error, "param", None),
            code=getattr(error, "code", ""),
        )

    def error(self) -> OffroadError:
        """The exception again, of the same class where `offroad.errors` has it."""
        kind = getattr(errors, self.kind, EngineDead)
        more: dict[str, Any] = {"found": self.found, "accepted": self.accepted, "next": self.next}
        if kind is RequestError:
            more |= {"param": self.param, "code": self.code}
        return kind(self.what, **more)


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First message: what to load, and which callable (`module:name`) makes the engine."""

    settings: Settings
    factory: str


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Asks for `engine.check()` or `engine.reset_prefix_cache()`; answered by a `Reply` of the same number."""

    number: int
    name: str


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """The bytes of each token (none: it is in no language) and the ids that end an answer: what grammars are compiled
    over. The server has them; to read them again would hold up the engine for seconds."""

    tokens: list[bytes]
    ends: tuple[int, ...]


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The engine closes and the process ends."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far the loading is: `fraction` 0 to 1 of `phase`."""

    phase: str
    fraction: float
    note: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded."""

    info: EngineInfo
    tokenizer: TokenizerFiles


class Events(msgspec.Struct, frozen=True, tag="events"):
    """All that one step brought. `sequences`: how far each is, told now and then; None: not this time."""

    events: list[TokenEvent]
    stats: Stats
    sequences: list[SequenceState] | None = None


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The engine has refused a request: RequestError or QueueFull."""

    request_id: str
    failure: Failure


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    number: int
    failure: Failure | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not be loaded or has ended; the process ends after this message."""

    failure: Failure


Command = Start | Submit | Abort | Call | Vocabulary | Close
Report = Progress | Ready | Events | Rejected | Reply | Failed

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_reports = msgspec.msgpack.Decoder(Report)


def pack(message: Command | Report) -> bytes:
    """The bytes of one message, its length first."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH, "little") + body


def read_command(stream: Any) -> Command | None:
    """The next command from a blocking binary stream; None at its end."""
    head = stream.read(_LENGTH)
    if len(head) < _LENGTH:
        return None
    size = int.from_bytes(head, "little")
    body = stream.read(size)
    return _commands.decode(body) if len(body) == size else None


async def read_report(reader: Any) -> Report:
    """The next report from an asyncio stream. Raises asyncio.IncompleteReadError at its end."""
    head = await reader.readexactly(_LENGTH)
    return _reports.decode(await reader.readexactly(int.from_bytes(head, "little")))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected stream sockets: the server's and the engine's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

"""The terminal chat: reading a message, its commands, and how Ctrl-C stops an answer and not the program."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from offroad.cli.backend import Backend, Message
from offroad.errors import OffroadError

HELP = """\
/reset        forget the conversation
/help         this text
/exit         leave (as Ctrl-D does)
A line that ends in a backslash goes on in the next one. A message that begins with \"\"\" or ``` goes on until a line
that ends with the same. Ctrl-C stops the answer; at the prompt, twice in a row leaves."""


def read_message(read: Callable[[str], str]) -> str:
    """One message: lines joined at a trailing backslash, or a block between \"\"\" (left out) or ``` (kept).

    `read(prompt)` gives a line and raises EOFError at the end, which passes through.
    """
    line = read(">>> ")
    for fence in ('"""', "```"):
        if line.lstrip().startswith(fence):
            return _block(line.strip(), fence, read)
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = read("... ")
    return "\n".join([*lines, line])


def _block(first: str, fence: str, read: Callable[[str], str]) -> str:
    lines = [first]
    while not (lines[-1].rstrip().endswith(fence) and (len(lines) > 1 or len(first) >= 2 * len(fence))):
        lines.append(read("... "))
    text = "\n".join(lines).rstrip()
    return text if fence == "```" else text.removeprefix(fence).removesuffix(fence).strip("\n")


@contextmanager
def stop_flag(raise_at_once: bool) -> Iterator[Callable[[], bool]]:
    """While the block runs, Ctrl-C sets a flag (the value is a function that reads it); the second one raises.

    With `raise_at_once` the first raises KeyboardInterrupt as well.
    """
    pressed = False

    def handler(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed or raise_at_once:
            raise KeyboardInterrupt
        pressed = True

    old = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, old)


class Chat:
    """A conversation with a backend, on a terminal."""

    def __init__(
        self, backend: Backend, options: dict[str, Any], system: str | None, out: TextIO, notes: TextIO
    ) -> None:
        self.backend, self.options, self.out, self.notes = backend, options, out, notes
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self.system)

    def ask(self, text: str) -> None:
        """Sends a message and writes the answer as it comes. Raises OffroadError; the message is then forgotten."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        stopped = False
        stream = self.backend.answer(self.messages, self.options)
        try:
            with stop_flag(self.backend.raise_at_once) as stop:
                try:
                    for piece in stream:
                        pieces.append(piece)
                        self.out.write(piece)
                        self.out.flush()
                        if stop():
                            stopped = True
                            break
                except KeyboardInterrupt:
                    if not self.backend.raise_at_once:
                        raise
                    stopped = True
                stream.close()
        except OffroadError:
            self.messages.pop()
            raise
        finally:
            self.out.write("\n")
            self.out.flush()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        self._note(stopped)

    def _note(self, stopped: bool) -> None:
        stats = self.backend.stats
        line = stats.line() if stats else ""
        if stopped:
            line = f"stopped, {line}" if line else "stopped"
        if line:
            dim, plain = ("\x1b[2m", "\x1b[0m") if self.notes.isatty() else ("", "")
            print(f"{dim}[{line}]{plain}", file=self.notes, flush=True)

    def command(self, text: str) -> bool:
        """Runs a `/command`; False means to leave."""
        if text in ("/exit", "/quit", "/bye"):
            return False
        if text == "/reset":
            self.messages = list(self.system)
            print("[the conversation is forgotten]", file=self.notes)
        elif text in ("/help", "/?"):
            print(HELP, file=self.notes)
        else:
            print(f"[unknown command {text.split()[0]}; /help lists them]", file=self.notes)
        return True

    def loop(self, read: Callable[[str], str] = input) -> None:
        """Reads and answers until /exit, the end of input, or Ctrl-C twice at the prompt."""
        from offroad.cli.main import print_error

        interrupted = False
        while True:
            try:
                text = read_message(read)
            except EOFError:
                print(file=self.notes)
                return
            except KeyboardInterrupt:
                print("\n" if interrupted else "\n[Ctrl-C again or Ctrl-D leaves]", file=self.notes)
                if interrupted:
                    return
                interrupted = True
                continue
            interrupted = False
            if not text.strip():
                continue
            if text.startswith("/") and "\n" not in text:
                if not self.command(text.strip()):
                    return
                continue
            try:
                self.ask(text)
            except OffroadError as error:
                print_error(error, self.notes)


def terminal_input() -> Callable[[str], str]:
    """`input` with line editing and history where Python has readline."""
    try:
        import readline  # noqa: F401  (importing it is what switches line editing on)
    except ImportError:
        print("[no line editing: this Python has no readline]", file=sys.stderr)
    return input

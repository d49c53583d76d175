"""Errors that say what is wrong, what was found, what would be accepted and what to do next."""

from __future__ import annotations


class OffroadError(Exception):
    """A failure that a user can act on.

    `what` names the thing, `found` the value found, `accepted` what would be accepted, `next` the next step. All four
    are kept apart so that a command line, an HTTP body and a log can each show them in their own form.
    """

    exit_code = 2

    def __init__(self, what: str, *, found: object = None, accepted: str = "", next: str = "") -> None:
        self.what, self.found, self.accepted, self.next = what, found, accepted, next
        super().__init__(self._text())

    def _text(self) -> str:
        parts = [self.what]
        if self.found is not None:
            parts.append(f"found: {self.found}")
        if self.accepted:
            parts.append(f"accepted: {self.accepted}")
        if self.next:
            parts.append(f"next: {self.next}")
        return "; ".join(parts)


class SettingsError(OffroadError):
    """A flag, a configuration key or a combination of them is not valid."""


class ModelNotFound(OffroadError):
    """The model is neither a folder, a file, a demo name nor a hub name that can be reached."""


class ModelError(OffroadError):
    """The checkpoint is damaged or is not one that offroad can serve."""


class PlanError(OffroadError):
    """Some cell of the plan has no kernel, or the model does not fit. Raised before any weight is read."""

    exit_code = 3


class RequestError(OffroadError):
    """A request that is refused: answered with 400. `param` names the field."""

    def __init__(self, what: str, *, param: str | None = None, code: str = "invalid_request", **more) -> None:
        self.param, self.code = param, code
        super().__init__(what, **more)


class QueueFull(OffroadError):
    """More requests than `max_num_seqs` may run and `max_waiting` may wait: answered with 429."""


class EngineDead(OffroadError):
    """The engine has ended; requests cannot be served any more."""

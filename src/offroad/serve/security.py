"""Who may call: API keys, and which web pages. Everything but `/health` needs a key where there are keys."""

from __future__ import annotations

import base64
import binascii
import hmac
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from offroad.errors import SettingsError
from offroad.serve.errors import Forbidden, KeyNeeded, response_of
from offroad.settings import Settings

OPEN_PATHS = frozenset({"/health"})
PAGE = "/"
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Keys:
    """The keys of one server; none: anybody may call."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._keys = tuple(key.encode() for key in keys)

    @classmethod
    def of(cls, settings: Settings) -> Keys:
        """Those of `--api-key` and of `--api-key-file`. Raises SettingsError, which shows no key."""
        keys = list(settings.api_key)
        if settings.api_key_file is not None:
            try:
                lines = Path(settings.api_key_file).read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(
                    "--api-key-file",
                    found=f"{settings.api_key_file} ({type(error).__name__})",
                    accepted="a readable file with a key on each line",
                ) from error
            given = [line.strip() for line in lines]
            keys += [line for line in given if line]
            if not any(given):
                raise SettingsError("--api-key-file", found="a file without keys", accepted="a key on each line")
        if not all(key.isascii() and key.isprintable() and " " not in key and key for key in keys):
            raise SettingsError(
                "an API key",
                found="an empty one, or one with blanks or characters that a header cannot carry",
                accepted="visible ASCII characters",
                next="e.g. `python -c 'import secrets; print(secrets.token_urlsafe(32))'`",
            )
        return cls(tuple(keys))

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __repr__(self) -> str:
        return f"Keys({len(self._keys)})"

    def hold(self, given: bytes) -> bool:
        """Whether `given` is a key. All keys are compared, each in a time that does not depend on where it differs."""
        return any([hmac.compare_digest(given, key) for key in self._keys])

    def scrub(self, text: str) -> str:
        """`text` without any key that it may have."""
        for key in self._keys:
            text = text.replace(key.decode(), "[key]")
        return text


class KeyGuard:
    """Lets requests through that bring a key: `Authorization: Bearer KEY`, `x-api-key: KEY` (Anthropic's clients), or,
    for the chat page in a browser, the key as password of the dialogue that the page's 401 opens (`Basic`).

    A browser sends what was typed there with requests of other sites too, so `Basic` is for this server's pages only,
    and for the page itself, which may be linked to.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self.keys or path_of(scope) in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._allows(path_of(scope), headers):
            await self.app(scope, receive, send)
            return
        challenge = 'Basic realm="offroad: the key is the password"' if path_of(scope) == PAGE else "Bearer"
        found = "a key that is not one of them" if _given(headers) else "no key"
        error = KeyNeeded(
            "this server needs an API key",
            found=found,
            accepted="Authorization: Bearer KEY, or x-api-key: KEY",
            next="ask who runs the server for a key",
        )
        await response_of(path_of(scope), error, {"WWW-Authenticate": challenge})(scope, receive, send)

    def _allows(self, path: str, headers: Headers) -> bool:
        basic = headers.get("authorization", "").lower().startswith("basic ")
        if basic and path != PAGE and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return False
        return any([self.keys.hold(given) for given in _given(headers)])


class SameSite:
    """Refuses what a web page of another origin would have the server do.

    Without CORS a page cannot read an answer, but its requests would still run. Browsers say where a request is from
    (`Sec-Fetch-Site`, or `Origin` alone in old ones); other clients do not, and are let through.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        self.app, self.origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _READS and self._foreign(Headers(scope=scope)):
            error = Forbidden(
                "the request comes from a web page of another origin",
                found=Headers(scope=scope).get("origin", "no Origin"),
                accepted=", ".join(self.origins) or "pages of this server",
                next="start the server with --allowed-origins ORIGIN",
            )
            await response_of(path_of(scope), error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _foreign(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if "*" in self.origins or origin in self.origins:
            return False
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site not in ("same-origin", "none")
        return origin is not None and origin.partition("://")[2] != headers.get("host")


def path_of(scope: Scope) -> str:
    """The path below where the app is mounted."""
    path, root = scope.get("path", ""), scope.get("root_path", "")
    return path.removeprefix(root) or "/" if root else path


def _given(headers: Headers) -> list[bytes]:
    """The keys that a request brings."""
    given = [value.encode("latin-1") for value in headers.getlist("x-api-key")]
    for value in headers.getlist("authorization"):
        scheme, _, rest = value.partition(" ")
        if scheme.lower() == "bearer":
            given.append(rest.strip().encode("latin-1"))
        elif scheme.lower() == "basic":
            try:
                given.append(base64.b64decode(rest, validate=True).partition(b":")[2])
            except (binascii.Error, ValueError):
                continue
    return [key for key in given if key]

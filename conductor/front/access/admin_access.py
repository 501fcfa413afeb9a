"""Access to `/dashboard` and `/admin`, which show all tenants' requests and affect all tenants.

If clients or admins have keys, these routes need an admin's key. Local requests need the key too, as requests
through a proxy on this machine look local. Without keys the dashboard is open, and `/admin` may be used from
this machine.

Owns: the decision which clients may use these routes. Does not know: what the routes do (`admin`,
`monitoring`).
"""

import base64
import ipaddress
import time
from enum import Enum

from fastapi import Request

from conductor.front.access.key_ring import KeyRing
from conductor.front.config import FrontConfig
from conductor.front.errors import UnauthorizedError
from conductor.front.metrics import Denial, Metrics
from mooncake.errors import RequestError

DASHBOARD, ADMIN = "/dashboard", "/admin"
ADMIN_PREFIXES = (DASHBOARD, ADMIN)
_PASSWORD = 'Basic realm="mooncake-serve, a key of http.admin_keys_file", charset="UTF-8"'
_ON_BEHALF = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via", "origin")
"""Headers that show that a proxy or a web page has sent the request on behalf of another client."""


class _Rule(Enum):
    """A condition under which admin routes may be used."""

    A_KEY = "a key of http.admin_keys_file"
    NOTHING = "nothing: clients have keys, and admins have none"
    NO_KEY = "no key: nobody has one"


class AdminAccess:
    """The checks of requests to admin routes, as FastAPI dependencies of the routes."""

    def __init__(self, config: FrontConfig, metrics: Metrics) -> None:
        """Read the admins' keys. Raises ConfigError if their file cannot be used."""
        self._ring = None if config.admin_keys_file is None else KeyRing(config.admin_keys_file)
        self._metrics = metrics
        if self._ring is not None:
            self._rule = _Rule.A_KEY
        else:
            self._rule = _Rule.NO_KEY if config.api_keys_file is None else _Rule.NOTHING

    async def check_looking(self, request: Request) -> None:
        """Check that the client may use the routes of `/dashboard`. Raises RequestError.

        Browsers send the key as a password.
        """
        if self._rule is not _Rule.NO_KEY:
            self._check_key(request, challenge=_PASSWORD)

    async def check_acting(self, request: Request) -> None:
        """Check that the client may use the routes of `/admin`. Raises RequestError."""
        if self._rule is _Rule.NO_KEY:
            _check_is_local(request)
            return
        try:
            self._check_key(request, challenge="Bearer")
        except RequestError:
            self._metrics.request_denied(Denial.NO_KEY)
            raise

    def _check_key(self, request: Request, challenge: str) -> None:
        if self._ring is None:
            raise RequestError(
                "this server has API keys, so /dashboard and /admin want an admin's: make one with"
                " `mooncake-serve apikey FILE NAME` and start the server with --http-admin-keys-file FILE",
                status=403,
                code="no_admin_keys",
            )
        try:
            self._ring.find(_as_bearer(request.headers.get("authorization")), time.monotonic())
        except UnauthorizedError as error:
            message = f"{error}; /dashboard and /admin take those of http.admin_keys_file"
            raise UnauthorizedError(message, error.code or "invalid_api_key", challenge) from None


def _as_bearer(authorization: str | None) -> str | None:
    """Return an `Authorization` header in Bearer form.

    In a Basic header, which browsers send, the password is the key. Returns None for an invalid Basic header.
    A header of another scheme is returned unchanged.
    """
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        _, _, secret = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:
        return None
    return f"Bearer {secret}"


def _check_is_local(request: Request) -> None:
    host = request.client.host if request.client is not None else ""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local or any(header in request.headers for header in _ON_BEHALF):
        message = (
            "/admin answers on the server's own machine only, at a loopback address, and to no proxy or"
            " web page there; others need a key of http.admin_keys_file"
        )
        raise RequestError(message, status=403, code="not_local")

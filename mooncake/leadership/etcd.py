"""A client of etcd, by the JSON form of its API: leases, keys under them, the oldest key under a prefix.

Owns: which of etcd's members is asked, TLS, the login. Does not know: what keys are for
(`mooncake.leadership.terms`, `mooncake.leadership.leaders`), when to try again.
"""

import base64
import contextlib
import ssl
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import httpx
import msgspec

from mooncake.config.cluster_section import ClusterConfig
from mooncake.errors import ConfigError, MooncakeError, first_line

ANSWER_TIMEOUT_S = 1.0
"""Seconds for an answer of one member, not more than the shortest lease."""
STATE_TIMEOUT_S = 5.0
"""Seconds for an answer about state, which may be large, and which etcd may be slow to write to its disk."""
SILENCE_S = 10.0
"""Seconds of silence after which a watch is begun again.

A broken network does not close a connection. If the member does not answer then, the next member is asked.
"""
_NO_ANSWER = (httpx.HTTPError, ssl.SSLError)
"""The errors that count as no answer.

A member that demands our certificate sends an alert after the TLS 1.3 handshake. httpx passes the SSLError of
this alert on as it is.
"""
_UNAUTHENTICATED, _NOT_FOUND = 16, 5  # gRPC's numbers of errors
_OLD_LOGIN = "revision of auth store is old"
_REFUSALS = ("authentication", "permission denied", "user name is empty")
"""Parts of the messages of permanent errors, whose cause is the configuration here or at etcd.

All other errors may be temporary.
"""


class UnreachableError(MooncakeError):
    """No member of etcd answers, or the members have no leader."""


class RefusedError(MooncakeError):
    """etcd answers, and does not permit the operation."""


class LeaseLostError(MooncakeError):
    """The lease has expired, and its keys are gone."""


class _OldLoginError(MooncakeError):
    """etcd does not know the login token, or has forgotten it."""


class _ExistsError(MooncakeError):
    """A lease with this number exists: the answer to an earlier try to grant it was lost."""


class FirstKey(NamedTuple):
    """The oldest key under a prefix. `revision` is etcd's revision at which the key was created."""

    key: bytes
    value: bytes
    revision: int


class Etcd:
    """A client of all members of one etcd. Use as an async context manager.

    All calls raise UnreachableError if no member answers, RefusedError if etcd does not permit the operation.
    """

    def __init__(self, config: ClusterConfig) -> None:
        """Prepare the client. Raises ConfigError for unusable files."""
        self._urls, self._first = list(config.etcd_endpoints), 0
        self._login: dict[str, str] | None = None
        if config.etcd_user is not None and config.etcd_password_file is not None:
            self._login = {"name": config.etcd_user, "password": _password(config.etcd_password_file)}
        self._token: str | None = None
        self._http = httpx.AsyncClient(verify=_tls(config), timeout=ANSWER_TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> "Etcd":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def grant(self, lease: int, ttl_s: int) -> None:
        """Grant the lease with this number, unless it exists.

        etcd may raise the time to live to its own minimum.
        """
        with contextlib.suppress(_ExistsError):
            await self._ask("lease/grant", {"ID": lease, "TTL": ttl_s})

    async def keep_alive(self, lease: int) -> None:
        """Renew a lease. Raises LeaseLostError."""
        answer = await self._ask("lease/keepalive", {"ID": lease})
        if int(answer.get("TTL", 0)) <= 0:
            raise LeaseLostError("etcd has not heard this process for too long, and has ended its lease")

    async def revoke(self, lease: int) -> None:
        """End a lease, and with it its keys. Raises LeaseLostError."""
        await self._ask("lease/revoke", {"ID": lease})

    async def create(self, key: bytes, value: bytes, lease: int) -> None:
        """Create a key that exists as long as the lease does, unless the key exists already.

        Raises LeaseLostError.
        """
        if int((await self._ask("kv/range", {"key": key, "count_only": True})).get("count", 0)):
            return  # a full etcd refuses even a transaction without effect
        absent = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}
        put = {"request_put": {"key": key, "value": value, "lease": lease}}
        await self._ask("kv/txn", {"compare": [absent], "success": [put]})

    async def change(
        self, values: Mapping[bytes, bytes | None], guard: bytes, revision: int, lease: int
    ) -> tuple[bool, int]:
        """Put keys, or delete them, all at once, if the key `guard` has not changed.

        Each change puts the guard too, under `lease`. So a change whose answer was lost is carried out before
        the next change, or never. Raises LeaseLostError.

        Args:
            values: At most 127 keys with their values; None deletes the key.
            guard: A key that only these changes write.
            revision: etcd's revision of the latest known change of the guard; 0 before the first.
            lease: The lease of the guard.

        Returns:
            Whether the change was made, and the revision for the next try.
        """
        unchanged = {"key": guard, "target": "MOD", "result": "EQUAL", "mod_revision": revision}
        requests: list[dict[str, Any]] = [{"request_put": {"key": guard, "lease": lease}}]
        for key, value in values.items():
            if value is None:
                requests.append({"request_delete_range": {"key": key}})
            else:
                requests.append({"request_put": {"key": key, "value": value}})
        asked = {"request_range": {"key": guard}}
        wanted = {"compare": [unchanged], "success": requests, "failure": [asked]}
        answer = await self._ask("kv/txn", wanted, STATE_TIMEOUT_S)
        if answer.get("succeeded"):
            return True, int(answer["header"]["revision"])
        found = answer["responses"][0]["response_range"].get("kvs", ())
        return False, int(found[0]["mod_revision"]) if found else 0

    async def page(self, prefix: bytes, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Return the next `limit` keys behind `after` that begin with `prefix` + `/`, with their values.

        The keys are in order. There are fewer only if no more are left.
        """
        wanted = {"key": after + b"\0", "range_end": prefix + bytes([ord("/") + 1]), "limit": limit}
        answer = await self._ask("kv/range", wanted, STATE_TIMEOUT_S)
        return [(_bytes(kv["key"]), _bytes(kv.get("value", ""))) for kv in answer.get("kvs", ())]

    async def first(self, prefix: bytes) -> AsyncGenerator[FirstKey, None]:
        """Yield the oldest key under `prefix` + `/`, and later each key that becomes the oldest.

        Ends after `SILENCE_S` without news; the next call begins with the key that is the oldest then.
        """
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, read=SILENCE_S)
        try:
            await self._log_in()
            request = self._request("election/observe", {"name": prefix}, timeout)
            async with contextlib.aclosing(await self._http.send(request, stream=True)) as response:
                if response.is_error:
                    _raise_failure(await response.aread())
                async for line in response.aiter_lines():
                    kv = _result(line.encode())["kv"]
                    yield FirstKey(_bytes(kv["key"]), _bytes(kv.get("value", "")), int(kv["create_revision"]))
            # The stream also ends in this way if the login is not known any more.
            await self._check(prefix)
        except (httpx.ReadTimeout, _OldLoginError):
            await self._check(prefix)
            return
        except (*_NO_ANSWER, UnreachableError) as error:
            raise self._next_member(error) from None
        raise self._next_member("the connection has ended")

    async def _check(self, prefix: bytes) -> None:
        """Ask for an answer about keys under `prefix`, and log in again if necessary."""
        await self._ask("kv/range", {"key": prefix + b"/", "count_only": True})

    # -- one call -----------------------------------------------------------------------------------

    async def _ask(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        with contextlib.suppress(_OldLoginError):
            return await self._ask_logged_in(path, body, timeout_s)
        self._token = None
        try:
            return await self._ask_logged_in(path, body, timeout_s)
        except _OldLoginError as error:
            self._token = None
            raise UnreachableError(f"etcd forgets logins at once: {error}") from None

    async def _ask_logged_in(self, path: str, body: dict[str, Any], timeout_s: float | None) -> Any:
        await self._log_in()
        return await self._ask_members(path, body, timeout_s)

    async def _log_in(self) -> None:
        if self._login is not None and self._token is None:
            self._token = str((await self._ask_members("auth/authenticate", self._login))["token"])

    async def _ask_members(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        """Ask one member after the other until one answers, each within `ANSWER_TIMEOUT_S` by default."""
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, read=timeout_s or ANSWER_TIMEOUT_S)
        unreachable = UnreachableError("etcd has no members")
        for _ in self._urls:
            try:
                response = await self._http.send(self._request(path, body, timeout))
                if response.is_error:
                    _raise_failure(response.content)
                return _result(response.content)
            except (*_NO_ANSWER, UnreachableError) as error:
                unreachable = self._next_member(error)
        raise unreachable

    def _request(self, path: str, body: dict[str, Any], timeout: httpx.Timeout) -> httpx.Request:
        headers = {"content-type": "application/json"}
        if self._token is not None:
            headers["authorization"] = self._token
        url = f"{self._urls[self._first]}/v3/{path}"
        content = msgspec.json.encode(body)  # bytes become base64, as etcd has them
        return self._http.build_request("POST", url, content=content, headers=headers, timeout=timeout)

    def _next_member(self, error: Exception | str) -> UnreachableError:
        """Switch to another member. Returns the error for the member that has failed."""
        failed, self._first = self._urls[self._first], (self._first + 1) % len(self._urls)
        return UnreachableError(f"{failed}: {error if isinstance(error, str) else first_line(error)}")


def _result(content: bytes) -> Any:
    """Return the content of an answer, or of one line of a stream. Raises the error that it reports."""
    message = _decoded(content)
    if "error" in message:
        _raise_failure(content)
    return message["result"] if message.keys() == {"result"} else message


def _raise_failure(content: bytes) -> NoReturn:
    """Raise the error that an answer reports."""
    failure = _decoded(content)
    if isinstance(failure.get("error"), dict):  # in a stream
        failure = failure["error"]
    message, code = str(failure.get("message")), failure.get("code", failure.get("grpc_code"))
    if code == _UNAUTHENTICATED or _OLD_LOGIN in message:
        raise _OldLoginError(message)
    if "lease already exists" in message:
        raise _ExistsError(message)
    if code == _NOT_FOUND:
        raise LeaseLostError(message)
    if any(part in message for part in _REFUSALS):
        raise RefusedError(message)
    raise UnreachableError(message)


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise RefusedError(
            f"expected JSON, found {content[:40]!r}; is it etcd 3.4 or later, with its gRPC gateway enabled?"
        ) from None


def _tls(config: ClusterConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.etcd_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cluster.etcd_ca {config.etcd_ca} cannot be used: {error}") from None
    if config.etcd_cert is not None and config.etcd_key is not None:
        try:
            context.load_cert_chain(config.etcd_cert, config.etcd_key, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cluster.etcd_cert {config.etcd_cert} with etcd_key {config.etcd_key} cannot be used:"
                f" {error}"
            ) from None
    return context


def _password(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster.etcd_password_file {file} cannot be read: {error}") from None


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)

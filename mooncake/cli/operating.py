"""The commands about instances of a running cluster: `drain`, `role` and `migrate`.

They send an order to a front, and wait until it is carried out. Ctrl-C ends the wait, not the order.

Owns: these commands, their output. Does not know: how an instance drains or switches its role.
"""

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar, assert_never
from urllib.parse import quote

import httpx
import msgspec

from mooncake.cli.command_line import INTERRUPTED
from mooncake.cli.steps import StepDisplay
from mooncake.errors import ConfigError, MooncakeError
from mooncake.messages.migration import ModuleKind, ModulesPart
from mooncake.messages.operators import InstanceStatus
from mooncake.messages.workers import InstanceState, Role

POLL_S = 0.25
ANSWER_TIMEOUT_S = 10.0
MOST_MISSED_S = 10.0
"""Seconds for which a command waits for a front that has answered before and answers no more."""
REGISTERED_AGAIN_S = 10.0
"""Seconds within which running instances register with another Conductor."""


_Body = TypeVar("_Body")


class ListOfInstances(msgspec.Struct):
    """The registered instances, as the Conductor of this `epoch` knows them."""

    instances: list[InstanceStatus]
    epoch: int = 0

    def get(self, name: str) -> InstanceStatus | None:
        """Return the status of an instance; None if it is not registered."""
        return next((one for one in self.instances if one.name == name), None)


class _ErrorText(msgspec.Struct):
    message: str
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorText


class UnansweredError(MooncakeError):
    """No front answers at the URL, or the front answers that it cannot serve the order now (503)."""


class AdminClient:
    """A client of the routes below `/admin/instances` of the front at `url`.

    `key`: an admin's API key, if the front needs one. Construction raises MooncakeError for an invalid URL.
    """

    def __init__(self, url: str, key: str | None, transport: httpx.BaseTransport | None = None) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._url = url.rstrip("/")
        try:
            self._http = httpx.Client(
                base_url=f"{self._url}/admin",
                headers=headers,
                timeout=ANSWER_TIMEOUT_S,
                transport=transport,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise MooncakeError(f"--url {url}: {error}") from None

    def instances(self) -> ListOfInstances:
        """Return all registered instances. Raises MooncakeError."""
        return self._read(self._ask("GET", "/instances"), ListOfInstances)

    def drain(self, name: str, *, force: bool) -> None:
        """Order an instance to drain; with `force` even if it is the last one for prefill or for decode.

        Raises MooncakeError.
        """
        self._ask("POST", f"/instances/{quote(name, safe='')}/drain", force=force)

    def change_role(self, name: str, role: Role, *, force: bool) -> None:
        """Order an instance to switch its role. Raises MooncakeError.

        With `force` the order holds even if the instance is the last one for prefill or for decode.
        """
        self._ask("POST", f"/instances/{quote(name, safe='')}/role", role=role.value, force=force)

    def move(self, name: str, helper: str, part: ModulesPart) -> None:
        """Order an instance to move a part of it to a helper. An empty part moves all modules back.

        Raises MooncakeError.
        """
        path = f"/instances/{quote(name, safe='')}"
        if not part:
            self._ask("POST", f"{path}/back", **{"from": helper})
            return
        match part.kind:
            case ModuleKind.PAGES:
                self._ask("POST", f"{path}/sequences", to=helper, share=part.share)
            case ModuleKind.LAYERS:
                self._ask("POST", f"{path}/layers", to=helper, layers=str(part.layers))
            case ModuleKind.HEADS:
                self._ask("POST", f"{path}/heads", to=helper, num=part.num_heads)
            case _:
                assert_never(part.kind)

    def _ask(self, method: str, path: str, **parameters: str | bool | float) -> httpx.Response:
        try:
            answer = self._http.request(method, path, params=parameters)
        except httpx.UnsupportedProtocol:
            raise MooncakeError(f"--url {self._url}: expected http://HOST:PORT or https://...") from None
        except httpx.TransportError as error:
            raise UnansweredError(
                f"no server answers at {self._url} ({error}); --url names another one"
            ) from None
        if answer.status_code >= 400:
            self._refuse(answer)
        return answer

    def _refuse(self, answer: httpx.Response) -> NoReturn:
        error = self._read(answer, _ErrorBody).error
        hint = ""
        if answer.status_code in (401, 403):
            hint = " (--key-file FILE has the key of an admin)"
        elif answer.status_code == 409:
            error.message = error.message.replace("`force`", "--force")
        elif answer.status_code == 404 and error.code is None:
            error.message = f"{self._url} has no /admin here; http.admin_listen says where it is"
        elif answer.status_code == 503:
            raise UnansweredError(error.message)
        raise MooncakeError(f"{error.message}{hint}")

    def _read(self, answer: httpx.Response, kind: type[_Body]) -> _Body:
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError:
            what = f"HTTP {answer.status_code} without the body that was expected"
            raise MooncakeError(f"{self._url} is no mooncake-serve of this release: {what}") from None


def drain(client: AdminClient, name: str, *, force: bool) -> int:
    """Drain an instance, and wait until it has left. Returns the exit code. Raises MooncakeError."""

    def end_of(status: InstanceStatus | None) -> str | None:
        if status is None:
            return f"{name} has left"
        if status.state in (InstanceState.SERVING, InstanceState.SWITCHING):
            raise MooncakeError(f"{name} is {status.state.value} again: the order was taken back, or lost")
        if status.stays:
            raise MooncakeError(f"{name} drains, but will not leave: somebody has ordered so (`stay`) since")
        return None

    order = partial(client.drain, name, force=force)
    goes_on = f"{name} goes on draining: `mooncake-serve drain {name}` waits for it again"
    return _wait(client, name, order, end_of, goes_on)


def change_role(client: AdminClient, name: str, role: Role, *, force: bool) -> int:
    """Switch an instance to another role, and wait until it serves in this role. Returns the exit code.

    Raises MooncakeError.
    """

    def end_of(status: InstanceStatus | None) -> str | None:
        if status is None:
            raise MooncakeError(f"{name} is lost; it has its old role when it comes back")
        if status.state is InstanceState.SWITCHING:
            return None
        if status.role is role:
            return f"{name} serves as {role.value}"
        why = f"it is {status.state.value}"
        if status.state is InstanceState.SERVING:
            why = "it could not finish its requests in time, or somebody took the order back"
        raise MooncakeError(f"{name} still has the role {status.role.value}: {why}")

    order = partial(client.change_role, name, role, force=force)
    goes_on = f"{name} goes on switching: GET /admin/instances and /dashboard show how far it is"
    return _wait(client, name, order, end_of, goes_on)


def migrate(client: AdminClient, name: str, helper: str, part: ModulesPart) -> int:
    """Move a part of an instance to a helper, and wait for the end of the move.

    An empty part moves all modules back. Returns the exit code. Raises MooncakeError.
    """

    def end_of(status: InstanceStatus | None) -> str | None:
        if status is None:
            raise MooncakeError(f"{name} is lost; all of it is there when it comes back")
        place = status.modules
        if place.is_moving:
            return None
        if (place.part, place.helper) != (part, helper if part else ""):
            raise MooncakeError(place.error or f"another order has been given for {name}")
        pages = f"{name} has {status.num_device_pages} pages"
        if not part:
            return f"all modules of {name} are there; {pages}"
        return f"{part.what} of {name} {'is' if part.num_heads == 1 else 'are'} at {helper}; {pages}"

    def shown(status: InstanceStatus) -> tuple[str, str]:
        return f"modules of {name} move", status.modules.error or f"{status.num_requests} requests go on"

    order = partial(client.move, name, helper, part)
    return _wait(client, name, order, end_of, "the move goes on", shown)


def _emptying(status: InstanceStatus) -> tuple[str, str]:
    return f"{status.name} is {status.state.value}", _progress(status)


def _wait(
    client: AdminClient,
    name: str,
    order: Callable[[], None],
    end_of: Callable[[InstanceStatus | None], str | None],
    goes_on: str,
    shown: Callable[[InstanceStatus], tuple[str, str]] = _emptying,
) -> int:
    """Send an order, and show its progress until `end_of` returns a text that says how it has ended.

    `goes_on` is the text for an interrupted wait. `shown` returns the present step and a count for the
    display. Returns the exit code.

    If another Conductor has just taken over, an instance that is not registered yet counts neither as left
    nor as lost.
    """
    epoch, registered_by_s = client.instances().epoch, -math.inf
    order()
    answered_s = time.monotonic()
    try:
        with StepDisplay() as display:
            while True:
                try:
                    listed = client.instances()
                    status, answered_s = listed.get(name), time.monotonic()
                    if listed.epoch != epoch:
                        epoch, registered_by_s = listed.epoch, answered_s + REGISTERED_AGAIN_S
                    may_come = status is None and answered_s < registered_by_s
                    if not may_come and (end := end_of(status)) is not None:
                        break
                    if status is not None:
                        step, count = shown(status)
                        display.show(step, count=count)
                except UnansweredError:
                    if time.monotonic() - answered_s > MOST_MISSED_S:
                        raise
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        print(goes_on, file=sys.stderr)
        return INTERRUPTED
    print(end)
    return 0


def _progress(status: InstanceStatus) -> str:
    parts = [f"{status.num_requests} requests left", f"{status.num_moved} moved"]
    if status.num_blocks_left:
        parts.append(f"{status.num_blocks_left} blocks to copy")
    return ", ".join(parts)


def read_key(file: Path | None) -> str | None:
    """Return the API key in a file; None without a file. Raises ConfigError."""
    if file is None:
        return None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {file}: {error}") from None

"""The pools of a client, and failover between them.

A connection is used by one thread at a time. A lost pool is reconnected by a thread of its own: about once a
second, and only while there are calls. If another pool can answer a call, the call waits only `_MOMENT_S` for
the reconnection.

Owns: open connections and their serials; failover to another pool that can answer. Does not know: the calls.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvstore.client.connections import PoolConnection, PoolURL
from kvstore.client.mapped import MappedConnection, Mapping
from kvstore.client.streamed import StreamedConnection
from kvstore.protocol.calls import SPOKEN, Connect
from mooncake.errors import ConfigError, MismatchError, MooncakeError, PoolError
from mooncake.messages.blocks import KVLayout
from mooncake.security.keys import ClusterKey

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds between a failed attempt to reconnect to a lost pool and the next attempt."""
_RECONNECT_TIMEOUT_S = 2.0
"""Seconds that one attempt to reconnect may take."""
_MOMENT_S = 0.02
"""Seconds for which a call waits for a lost pool when another pool can answer."""
_serials = itertools.count(1)
Answer = TypeVar("Answer")


class Unreachable(Exception):
    """A pool does not answer, or has come back for another model or layout, or with another cluster key.

    The message says why.
    """

    def __init__(self, url: PoolURL, reason: Exception) -> None:
        super().__init__(str(reason))
        self.url = url
        self.reason = reason


class Backend:
    """One pool, and a client's connections to it.

    `fingerprint` and `layout`: the values that the pool must have; None while unknown. `key`: the cluster
    key; not needed for a pool on this host. `formats_anew`: whether the pool is formatted with this
    fingerprint and layout when it comes back empty.
    """

    def __init__(
        self,
        url: PoolURL,
        key: ClusterKey | None,
        fingerprint: str | None,
        layout: KVLayout | None,
        timeout_s: float,
        *,
        formats_anew: bool = False,
    ) -> None:
        self.url = url
        self._formats_anew = formats_anew
        self._key = key
        self.fingerprint = fingerprint
        self.layout = layout
        self._timeout_s = timeout_s
        self._lost: Exception | None = None
        """Reason why the pool counts as lost; None while it answers."""
        self._retry_at_s = 0.0
        self._attempt: threading.Thread | None = None
        self._idle: deque[PoolConnection] = deque()
        self._lock = threading.Lock()
        """Lock of the serials and of `_attempt`."""
        self._free_serials: list[int] = []
        """Serials of closed connections, to be used again.

        The last `_num_unsettled` serials are those of lost connections that may have had pages reserved.
        """
        self._num_unsettled = 0
        """Number of serials at the end of `_free_serials` whose connections may have had pages reserved."""
        self._mapping: Mapping | None = None
        self._is_closed = False

    def connect(self, *, may_format: bool) -> None:
        """Make the first connection, and take over the pool's fingerprint and layout.

        With `may_format`, a pool without a format is formatted. Raises Unreachable if the pool does not
        answer, or the error with which the pool refuses this client.
        """
        try:
            connection = self._open(self._timeout_s, may_format=may_format)
        except OSError as error:
            self._lost = error
            raise Unreachable(self.url, error) from error
        self.fingerprint, self.layout = connection.fingerprint, connection.layout
        self._idle.append(connection)

    def run(self, use: Callable[[PoolConnection], Answer], *, patiently: bool = True) -> Answer:
        """Call `use` with a connection that no other thread uses meanwhile, and return its result.

        If an idle connection belongs to a messenger that has ended, `use` is called again with a new
        connection. `patiently`: whether a call waits until an attempt to reconnect to a lost pool has ended.
        Raises Unreachable, and the errors of `mooncake.errors` that `use` raises.
        """
        while True:
            try:
                connection, is_new = self._idle.pop(), False
            except IndexError:
                connection, is_new = self._connect(patiently), True
            try:
                answer = use(connection)
            except MooncakeError:
                self._put_back(connection)
                raise
            except OSError as error:
                self._discard(connection, unsettled=True)
                if is_new or isinstance(error, TimeoutError):
                    self._lose(error)
                    raise Unreachable(self.url, error) from error
                self._discard_idle()
            except BaseException:
                self._discard(connection)
                raise
            else:
                self._put_back(connection)
                return answer

    def close(self) -> None:
        """Close idle connections. Connections in use are closed when they are returned."""
        self._is_closed = True
        self._discard_idle()

    # -- connections ------------------------------------------------------------------------------

    def _put_back(self, connection: PoolConnection) -> None:
        if not connection.is_open:
            self._discard(connection)
            return
        self._lost = None
        self._idle.append(connection)
        if self._is_closed:
            self._discard_idle()

    def _discard(self, connection: PoolConnection, *, unsettled: bool = False) -> None:
        connection.close()
        with self._lock:
            if unsettled:
                self._free_serials.append(connection.serial)
                self._num_unsettled += 1
            else:
                self._free_serials.insert(0, connection.serial)

    def _discard_idle(self) -> None:
        while self._idle:
            try:
                self._discard(self._idle.pop())
            except IndexError:
                return  # another thread was faster

    def _open(self, timeout_s: float, *, may_format: bool) -> PoolConnection:
        """Return a new connection, with the serial of a closed connection if there is one."""
        with self._lock:
            serial = self._free_serials.pop() if self._free_serials else next(_serials)
            was_unsettled = self._num_unsettled > 0
            self._num_unsettled -= was_unsettled
        try:
            connect = Connect(0, self.fingerprint, self.layout, serial, may_format, *SPOKEN)
            if self.url.tcp is not None:
                assert self._key is not None
                return StreamedConnection.open(self.url, connect, timeout_s, self._key)
            connection = MappedConnection.open(self.url, connect, timeout_s, self._mapping)
        except BaseException:
            with self._lock:
                self._free_serials.append(serial)
                self._num_unsettled += was_unsettled
            raise
        self._mapping = connection.mapping
        return connection

    # -- a pool that comes and goes ---------------------------------------------------------------

    def _connect(self, patiently: bool) -> PoolConnection:
        if self._lost is not None and (attempt := self._try_again(patiently)) is not None:
            attempt.join(2 * _RECONNECT_TIMEOUT_S if patiently else _MOMENT_S)
        if (lost := self._lost) is not None:
            raise Unreachable(self.url, lost)
        try:
            return self._idle.pop()
        except IndexError:
            pass
        try:
            return self._open(self._timeout_s, may_format=self._formats_anew)
        except (OSError, MooncakeError) as error:
            self._lose(error)
            raise Unreachable(self.url, error) from error

    def _try_again(self, patiently: bool) -> threading.Thread | None:
        """Start an attempt to reconnect, unless one runs already.

        If not `patiently`, an attempt is started only after a pause since the last failure.

        Returns:
            The thread of the attempt for which the caller should wait: the one that was started, or with
            `patiently` also one that runs already. Otherwise None.
        """
        with self._lock:
            if self._attempt is not None:
                return self._attempt if patiently else None
            if not patiently and time.monotonic() < self._retry_at_s:
                return None
            self._attempt = threading.Thread(target=self._reconnect, name="pool-reconnect", daemon=True)
            self._attempt.start()
            return self._attempt

    def _reconnect(self) -> None:
        """Reconnect to the pool, and renew all lost connections that may have had pages reserved.

        The pool keeps such pages quarantined until a connection with the same serial is made.
        """
        try:
            while True:
                timeout_s = min(self._timeout_s, _RECONNECT_TIMEOUT_S)
                self._put_back(self._open(timeout_s, may_format=self._formats_anew))
                if not self._num_unsettled:
                    break
        except (OSError, MooncakeError) as error:
            self._lose(error)
        finally:
            self._attempt = None

    def _lose(self, error: Exception) -> None:
        if isinstance(error, MismatchError):
            if not isinstance(self._lost, MismatchError):
                log.error("the pool at %s holds other blocks now and is not used: %s", self.url.text, error)
        elif isinstance(error, ConfigError):
            if not isinstance(self._lost, ConfigError):
                log.error("the pool at %s is not used: %s", self.url.text, error)
        elif self._lost is None and not self._is_closed:
            log.warning("pool lost, its blocks count as not there: %s", error)
        self._retry_at_s = time.monotonic() + RETRY_S
        self._lost = error
        self._discard_idle()


class Backends:
    """The pools of a client, in the order in which they are asked.

    If no pool answers, all methods raise an error: MismatchError if a pool now belongs to another model or
    layout, ConfigError if a pool now has another cluster key, else PoolError.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.all = list(backends)

    def first(self, use: Callable[[PoolConnection], Answer]) -> Answer:
        """Return the result of `use` with a connection to the first pool that answers."""
        return next(self._ask(use))

    def each(self, use: Callable[[PoolConnection], Answer]) -> list[Answer]:
        """Return the results of `use` with a connection to each pool that answers."""
        return list(self._ask(use))

    def in_turn(
        self, wanted: Sequence[int], use: Callable[[PoolConnection, Sequence[int]], Sequence[int]]
    ) -> None:
        """Ask one pool after the other for the blocks at the positions `wanted`, until all are found.

        `use` is called with the positions that are still wanted, and returns the positions whose blocks its
        pool lacks.
        """

        def ask(connection: PoolConnection) -> None:
            nonlocal wanted
            wanted = use(connection, wanted)

        for _ in self._ask(ask):
            if not wanted:
                return

    def _ask(self, use: Callable[[PoolConnection], Answer]) -> Iterator[Answer]:
        lost: list[Unreachable] = []
        has_answer = False
        # A lost pool is waited for only if no other pool answers.
        for patiently in (True,) if len(self.all) == 1 else (False, True):
            for backend in self.all:
                try:
                    answer = backend.run(use, patiently=patiently)
                except Unreachable as error:
                    lost.append(error)
                else:
                    has_answer = True
                    yield answer
            if has_answer:
                return
        raise no_answer(lost)


def connect_all(
    urls: Sequence[PoolURL],
    key: ClusterKey | None,
    fingerprint: str | None,
    layout: KVLayout | None,
    timeout_s: float,
    *,
    formats_anew: bool,
) -> tuple[Backends, str, KVLayout]:
    """Connect to the pools at `urls`, some of which may be lost.

    Returns the pools, and their common fingerprint and layout. If `fingerprint` and `layout` are given, new
    pools are formatted for them. With `formats_anew`, pools that come back empty later are formatted again.
    Raises PoolError if all pools are lost, or the error with which a pool refuses.
    """
    backends, lost = [], []
    may_format = fingerprint is not None and layout is not None
    for url in urls:
        backend = Backend(url, key, fingerprint, layout, timeout_s, formats_anew=formats_anew)
        backends.append(backend)
        try:
            backend.connect(may_format=may_format)
        except Unreachable as error:
            lost.append(error)
        except BaseException:
            for opened in backends:
                opened.close()
            raise
        fingerprint, layout = backend.fingerprint, backend.layout
    if len(lost) == len(backends):
        raise no_answer(lost)
    for reason in lost:
        log.warning("one of %d pools does not answer and is tried again: %s", len(backends), reason)
    assert fingerprint is not None
    assert layout is not None
    for backend in backends:
        backend.fingerprint, backend.layout = fingerprint, layout
    return Backends(backends), fingerprint, layout


def no_answer(lost: Sequence[Unreachable]) -> PoolError | MismatchError | ConfigError:
    """Return the error of a call that no pool answers.

    The error is a ConfigError or a MismatchError if a pool refuses for good, else a PoolError.
    """
    for error in lost:
        if isinstance(error.reason, ConfigError):
            return ConfigError(str(error))
        if isinstance(reason := error.reason, MismatchError):
            advice = f"the pool at {error.url.text} holds other blocks than this client; connect again"
            return MismatchError(reason.what, reason.ours, reason.theirs, advice)
    return PoolError(f"no pool answers: {'; '.join(dict.fromkeys(map(str, lost)))}")

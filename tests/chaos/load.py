"""Clients that send requests with known answers all the time, and the outcome of each request.

Owns: the catalogue of requests with the answers of an undisturbed cluster, the clients, the outcomes. Does
not know: faults.
"""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

LONGEST_REQUEST_S = 150.0
"""Seconds within which each request must end, in whichever way."""
_CONNECT_S = 5.0
_RETRYABLE = (429, 503)
_MOST_REFUSED_PAUSE_S = 0.5
"""The most seconds for which a refused client waits before its next request."""


@dataclass(frozen=True)
class Known:
    """A request, and its answer on an undisturbed cluster: text and finish reason of each choice."""

    kind: str
    body: dict[str, Any]
    answer: tuple[tuple[str, str], ...] = ()


@dataclass
class Outcome:
    """The outcome of one request. Times are in seconds of the monotonic clock."""

    front: str
    kind: str
    began_s: float
    ended_s: float = 0.0
    end: str = ""
    """The way in which the request ended.

    `completed`; `cancelled` by the client; `refused`; `failed` by an error in its stream; or `cut` without
    any message.
    """
    detail: str = ""
    reached: bool | None = None
    """Whether the request reached the front; None if that is unknown."""
    wrong: str = ""
    """The violated invariant; empty if there is none."""


def catalogue(ask: "Asking") -> list[Known]:
    """Return all requests that clients draw from, with their answers.

    To be called on a cluster without faults.
    """
    known = []
    for number in range(2):
        shared = [3 + number, *range(10, 10 + 40 * (number + 1))]
        plain = {"prompt": shared, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        seeded = {"temperature": 1.0, "top_k": 20, "seed": 7 + number}
        schema = {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 999}},
            "required": ["a"],
        }
        schema["additionalProperties"] = False
        held_to = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        bodies = {
            "greedy": plain,
            "stream": plain | {"max_tokens": 150, "stream": True},
            "long stream": plain | seeded | {"max_tokens": 1000, "stream": True},
            "seeded": plain | seeded | {"prompt": [*shared, 99]},
            "n=2": plain | seeded | {"n": 2, "stream": number % 2 == 0},
            "grammar": {"prompt": shared, "max_tokens": 60, "temperature": 0, "response_format": held_to},
            "stop": plain | {"max_tokens": 120, "stream": True},
        }
        for kind, body in bodies.items():
            if kind == "stop":
                body = body | {"stop": [_a_part_of(ask.quietly(body)[0][0])]}
            known.append(Known(kind, {"model": "tiny"} | body, ask.quietly(body)))
    return known


def _a_part_of(text: str) -> str:
    """Return three printable letters from the middle of a text."""
    middle = text[len(text) // 3 :]
    return next(
        middle[at : at + 3]
        for at in range(len(middle))
        if middle[at : at + 3].isprintable() and "\ufffd" not in middle[at : at + 3]
    )


class Asking:
    """A client's connection to one front."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._http = httpx.Client(timeout=httpx.Timeout(LONGEST_REQUEST_S, connect=_CONNECT_S))

    def close(self) -> None:
        self._http.close()

    def quietly(self, body: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        """Send a request, and return its answer. Raises AssertionError if it is not completed."""
        outcome = Outcome("", "", time.monotonic())
        answer = self._read({"model": "tiny"} | body, outcome, None)
        assert (outcome.end, outcome.wrong) == ("completed", ""), outcome
        return answer

    def ask(self, known: Known, front: str, hang_up_after: int | None) -> Outcome:
        """Send a request, and return its outcome, with the answer compared to the known one.

        The client hangs up after `hang_up_after` events of a stream; None for never.
        """
        outcome = Outcome(front, known.kind, time.monotonic())
        try:
            answer = self._read(known.body, outcome, hang_up_after)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            outcome.end, outcome.detail, outcome.reached = "cut", repr(error), False
        except httpx.HTTPError as error:
            outcome.end, outcome.detail = "cut", repr(error)
        except (ValueError, KeyError) as error:
            outcome.end, outcome.wrong = "failed", f"{known.kind} got what is no answer: {error!r}"
        else:
            if outcome.end == "completed" and answer != known.answer:
                outcome.wrong = f"{known.kind} gave {answer!r} instead of {known.answer!r}"
        outcome.ended_s = time.monotonic()
        if outcome.ended_s - outcome.began_s > LONGEST_REQUEST_S:
            outcome.wrong = f"took {outcome.ended_s - outcome.began_s:.0f} s"
        return outcome

    def _read(
        self, body: dict[str, Any], outcome: Outcome, hang_up_after: int | None
    ) -> tuple[tuple[str, str], ...]:
        with self._http.stream("POST", self._url, json=body) as response:
            outcome.reached = True
            if response.status_code != 200:
                _refused(response, outcome)
                return ()
            if body.get("stream"):
                return _streamed(response, outcome, hang_up_after)
            content = json.loads(response.read())
            outcome.end = "completed"
            choices = sorted(content["choices"], key=lambda choice: int(choice["index"]))
            return tuple((choice["text"], choice["finish_reason"]) for choice in choices)


def _refused(response: httpx.Response, outcome: Outcome) -> None:
    content = response.read().decode(errors="replace")
    outcome.end, outcome.detail = "refused", f"{response.status_code} {content}"
    if (
        response.status_code not in _RETRYABLE
        or "retry-after" not in response.headers
        or "error" not in content
    ):
        outcome.wrong = f"refused with {response.status_code} {dict(response.headers)}: {content}"


def _streamed(
    response: httpx.Response, outcome: Outcome, hang_up_after: int | None
) -> tuple[tuple[str, str], ...]:
    told: dict[int, str] = {}
    ends: dict[int, str] = {}
    for number, event in enumerate(_events(response)):
        if outcome.end:
            outcome.wrong = f"an event after its end ({outcome.end}): {event}"
        if number == hang_up_after:
            outcome.end = "cancelled"
            return ()
        if event == "[DONE]":
            outcome.end = "completed"
            continue
        content = json.loads(event)
        if "error" in content:
            outcome.end, outcome.detail = "failed", event
            continue
        for choice in content["choices"]:
            index = choice["index"]
            if index in ends:
                outcome.wrong = f"choice {index} went on after its end: {event}"
            told[index] = told.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                ends[index] = choice["finish_reason"]
    if not outcome.end:
        outcome.end, outcome.detail = "cut", "its stream has no end"
    return tuple((told[index], ends.get(index, "")) for index in sorted(told))


def _events(response: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))


class Load:
    """Clients of all fronts, which send requests between `resume` and `pause`. Use as a context manager."""

    def __init__(
        self, urls: dict[str, str], known: Sequence[Known], seed: int, num_clients_each: int = 3
    ) -> None:
        self._urls, self._known, self._seed = urls, known, seed
        self.outcomes: list[Outcome] = []
        self._changed = threading.Condition()
        self._asks = self._is_over = False
        self._num_idle = 0
        self._num_clients_each = num_clients_each
        self._clients: list[Future[None]] = []

    def __enter__(self) -> "Load":
        self._pool = ThreadPoolExecutor(self._num_clients_each * len(self._urls))
        for front in self._urls:
            for number in range(self._num_clients_each):
                rng = random.Random(f"{self._seed} {front} {number}")
                self._clients.append(self._pool.submit(self._keep_asking, front, rng))
                self._clients[-1].add_done_callback(self._client_ended)
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._pool.shutdown()

    def _client_ended(self, _: Future[None]) -> None:
        with self._changed:
            self._changed.notify_all()

    def resume(self) -> None:
        with self._changed:
            self._asks = True
            self._changed.notify_all()

    def pause(self) -> None:
        """Stop sending requests, and wait until all requests have ended."""
        with self._changed:
            self._asks = False
        self._wait_for(lambda: self._num_idle == len(self._clients), "all requests have ended")

    def wait_for_answers(self, num: int) -> None:
        """Wait until clients of each front have got `num` more answers."""
        before = self._num_completed()
        self._wait_for(
            lambda: all(self._num_completed()[front] >= before[front] + num for front in self._urls),
            "each front answers",
        )

    def _num_completed(self) -> Counter[str]:
        return Counter(outcome.front for outcome in self.outcomes if outcome.end == "completed")

    def wait_for_answer_since(self, began_s: float) -> float:
        """Wait until a request is answered that began at or after `began_s`.

        Returns the seconds from then on.
        """

        def first_end_s() -> float | None:
            later = [
                one.ended_s for one in self.outcomes if one.end == "completed" and one.began_s >= began_s
            ]
            return min(later, default=None)

        self._wait_for(lambda: first_end_s() is not None, "a new request is answered")
        first_s = first_end_s()
        assert first_s is not None
        return first_s - began_s

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` is true.

        Raises AssertionError if it does not come true, or if a client fails.
        """

        def has_ended() -> bool:
            return any(client.done() for client in self._clients)

        with self._changed:
            came = self._changed.wait_for(lambda: has_ended() or condition(), timeout=2 * LONGEST_REQUEST_S)
        errors = [repr(client.exception()) for client in self._clients if client.done()]
        assert not errors, f"clients have ended: {', '.join(errors)}"
        assert came, f"never: {what}"

    def _may_ask(self) -> bool:
        """Wait until clients are to send requests. Returns False when the load is over."""
        with self._changed:
            self._num_idle += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._asks or self._is_over)
            self._num_idle -= 1
            return not self._is_over

    def _keep_asking(self, front: str, rng: random.Random) -> None:
        asking = Asking(self._urls[front])
        while self._may_ask():
            known = rng.choice(self._known)
            hangs_up = known.body.get("stream") and rng.random() < 0.1
            outcome = asking.ask(known, front, rng.randrange(20) if hangs_up else None)
            with self._changed:
                self.outcomes.append(outcome)
                self._changed.notify_all()
                if outcome.end in ("refused", "cut"):
                    asking.close()
                    asking = Asking(self._urls[front])
                    self._changed.wait_for(lambda: self._is_over, rng.uniform(0.05, _MOST_REFUSED_PAUSE_S))
        asking.close()

"""The runs of one command: each load against each server, in turn.

Owns: the order of runs, the choice of each server's model, the progress display. Does not know: the command
line.
"""

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from urllib.error import HTTPError, URLError

import rich.console

from benchmarks.tools.load.client import api_key_header
from benchmarks.tools.load.clients import ClientError, Clients
from benchmarks.tools.load.measures import Slo, summarize
from benchmarks.tools.load.outcomes import Kind, Outcome, RunResult
from benchmarks.tools.load.report import Measured
from benchmarks.tools.load.sources import Load, Run
from mooncake.cli.steps import StepDisplay
from mooncake.errors import ConfigError

MODELS_TIMEOUT_S = 10.0
NUM_WARM_UP = 2
_WARM_UP_SEED = 0xC01D


class Server(NamedTuple):
    """A server under measurement. `context_len` is None if the server does not report it."""

    url: str
    model: str
    context_len: int | None


def find_server(url: str, model: str | None, context_len: int | None) -> Server:
    """Return the server at `url`, with the named model or its first one. Raises ClientError, ConfigError."""
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no server's URL, which begins with http:// or https://")
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=api_key_header())
        with urllib.request.urlopen(request, timeout=MODELS_TIMEOUT_S) as response:
            models = json.load(response)["data"]
        found = next(entry for entry in models if model in (None, entry["id"]))
    except StopIteration:
        raise ClientError(f"{url} has no model {model}") from None
    except HTTPError as error:
        hint = "; the variable OPENAI_API_KEY says which API key is sent" if error.code in (401, 403) else ""
        raise ClientError(f"{url}/v1/models answers with status {error.code}{hint}") from None
    except URLError as error:
        raise ClientError(f"{url} does not answer: {error.reason}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClientError(f"{url}/v1/models does not name the server's models: {error}") from None
    return Server(url, found["id"], context_len or found.get("max_model_len"))


class Bench:
    """The measurements of `servers` under `loads`. `run` has the settings that all runs share."""

    def __init__(self, servers: Sequence[Server], loads: Sequence[Load], run: Run, num_rounds: int) -> None:
        self._servers, self._loads, self._run, self._num_rounds = servers, loads, run, num_rounds
        self._results: dict[tuple[Load, Server], RunResult] = {}
        self._console = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self.was_interrupted = False

    def measure(self, clients: Clients) -> None:
        """Measure every load, round by round. Within a round the servers take turns.

        Each round begins with another server. Ctrl-C ends the run, and keeps the results so far. Raises
        ClientError.
        """
        for server in self._servers:
            self._warm_up(clients, self._at(server))
        for index, load in enumerate(self._loads):
            for round_index in range(self._num_rounds):
                first = round_index % len(self._servers)
                for server in [*self._servers[first:], *self._servers[:first]]:
                    # Prompts that a server has seen in an earlier run are in its cache.
                    seed = self._run.seed + index * self._num_rounds + round_index
                    run = replace(
                        self._at(server), rate_per_s=load.rate_per_s, concurrency=load.concurrency, seed=seed
                    )
                    result = self._one(clients, f"{load.name}, {server.url}", run)
                    self._results.setdefault((load, server), RunResult()).add(result)
                    if result.was_interrupted:
                        self.was_interrupted = True
                        return

    def measured(self, slo: Slo) -> list[Measured]:
        """Return the summary of each load and server."""
        return [
            Measured(server.url, load.name, load.rate_per_s, summarize(result, slo))
            for (load, server), result in self._results.items()
        ]

    def outcomes(self) -> list[list[Outcome]]:
        """Return the outcomes of each load and server, in the order of `measured`."""
        return [result.outcomes for result in self._results.values()]

    def _warm_up(self, clients: Clients, run: Run) -> None:
        """Send a few requests, to open connections and to check that the server answers.

        Raises ClientError.
        """
        seed = run.seed + _WARM_UP_SEED
        result = clients.run(
            replace(run, concurrency=1, seed=seed, num_requests=NUM_WARM_UP, duration_s=None), lambda _: None
        )
        if result.was_interrupted:
            raise KeyboardInterrupt
        if failed := [outcome for outcome in result.outcomes if outcome.kind is not Kind.FINISHED]:
            raise ClientError(f"{run.url} does not answer as it should: {failed[0].error}")

    def _at(self, server: Server) -> Run:
        return replace(self._run, url=server.url, model=server.model, context_len=server.context_len)

    def _one(self, clients: Clients, title: str, run: Run) -> RunResult:
        if not self._console.is_terminal:
            self._console.print(title, markup=False)
        with StepDisplay(self._console) as steps:

            def show(result: RunResult) -> None:
                num_ended = len(result.outcomes)
                num_rejected = sum(outcome.kind is Kind.REJECTED for outcome in result.outcomes)
                num_failed = sum(outcome.kind is Kind.FAILED for outcome in result.outcomes)
                state = (
                    f"{result.num_sent} sent, {num_ended} ended, {num_rejected} rejected, {num_failed} failed"
                )
                steps.show(title, num_ended, run.num_requests, count=state)

            return clients.run(run, show)

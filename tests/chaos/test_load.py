"""Clients that come upon something that they do not know."""

import pytest

from tests.chaos.load import Asking, Known, Load, Outcome


def test_a_client_that_ends_by_an_error_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> Outcome:
        raise TypeError("list indices must be integers")

    monkeypatch.setattr(Asking, "ask", ask)
    with Load({"front": "http://front:8000"}, [Known("greedy", {})], seed=1) as load:
        load.resume()
        with pytest.raises(AssertionError, match=r"clients have ended: TypeError\('list indices"):
            load.wait_for_answers(1)
        with pytest.raises(AssertionError, match="clients have ended"):
            load.pause()

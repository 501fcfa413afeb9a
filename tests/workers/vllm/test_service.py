"""The end of vLLM is told in one line, and the worker ends with it."""

import pytest

from workers.errors import EngineLostError
from workers.vllm import service


@pytest.mark.parametrize("is_in_group", [False, True])
def test_a_lost_engine_ends_the_worker_with_one_line(
    monkeypatch: pytest.MonkeyPatch, is_in_group: bool
) -> None:
    def child_main(*_: object) -> None:
        lost = EngineLostError("vLLM has ended with status 1; its log says why")
        raise ExceptionGroup("a group of tasks", [lost]) if is_in_group else lost

    monkeypatch.setattr(service, "child_main", child_main)
    with pytest.raises(SystemExit) as caught:
        service.main()
    assert caught.value.code == "vLLM has ended with status 1; its log says why"

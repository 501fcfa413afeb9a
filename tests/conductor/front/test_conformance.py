"""The API keeps to the document that it gives of itself: schemathesis, with all of its checks.

Its own plugin for pytest is switched off in `pyproject.toml`; requests are drawn by hypothesis.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from conductor.front.openai.tool_calls import ToolFormat
from tests.conductor.front.fakes import DEADLINE_S, MODEL_NAME, Running, byte_model, running_front

RULES = re.compile(
    "|".join(
        (
            "cannot be combined",
            "chat template refused",
            "expected a JSON object",
            "expected (a token id|token ids)",
            "expected at least one layer",
            "expected either",
            "give one of them",
            "has no token",
            "more than 128 choices",
            "KVCache is kept in blocks",
            "is for (messages|a prompt)",
            "is none of the tools",
            "is only allowed",
            "is required",
            "maximum context length",
            "needs tools",
            "raise max_tokens",
            "the same name",
            str(2**63),
        )
    )
)
"""what a schema does not say: rules between fields, the model's limits, and the largest integers exactly"""


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = replace(byte_model(), tool_format=ToolFormat.HERMES)
    with running_front(tmp_path_factory.mktemp("front"), model) as front:
        yield front


@pytest.fixture
def api(front: Running) -> schemathesis.BaseSchema:
    config = SchemathesisConfig.from_dict({"base-url": front.url})
    return schemathesis.openapi.from_url(f"{front.url}/openapi.json", config=config)


def ask(case: schemathesis.Case, session: requests.Session) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL_NAME  # another one is refused before anything else is looked at
    response = case.call_and_validate(
        session=session, excluded_checks=[positive_data_acceptance], timeout=DEADLINE_S
    )
    mode = case.meta.generation.mode
    if mode.is_positive and response.status_code == 400:  # what that check would forbid
        message = response.json()["error"]["message"]
        assert RULES.search(message), f"{case.body} fits the document, but: {message}"


def ask_what_is_drawn(api: schemathesis.BaseSchema, mode: GenerationMode, num_each: int) -> None:
    with requests.Session() as session:
        for operation in (found.ok() for found in api.get_all_operations()):
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue  # any path is text

            @settings(
                max_examples=num_each,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            )
            @given(operation.as_strategy(generation_mode=mode))
            def drawn(case: schemathesis.Case) -> None:
                ask(case, session)

            drawn()


@pytest.mark.parametrize("mode", GenerationMode)
def test_drawn_requests(api: schemathesis.BaseSchema, mode: GenerationMode) -> None:
    ask_what_is_drawn(api, mode, num_each=4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", GenerationMode)
def test_many_drawn_requests(api: schemathesis.BaseSchema, mode: GenerationMode) -> None:
    ask_what_is_drawn(api, mode, num_each=1000)


def test_each_field_at_its_bounds_and_beyond(api: schemathesis.BaseSchema) -> None:
    """Also methods that a path does not have, and other types of content."""
    with requests.Session() as session:
        for operation in (found.ok() for found in api.get_all_operations()):
            for case in api.iter_coverage_cases(
                operation,
                generation_modes=list(GenerationMode),
                generation_config=api.config.generation_for(operation=operation),
            ):
                ask(case, session)

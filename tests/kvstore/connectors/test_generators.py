"""Generators that are set back to the beginning of a step."""

import pytest
import torch

from kvstore.connectors.vllm import generators
from kvstore.connectors.vllm.generators import RewindableGenerator


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Generator", torch.Generator)
    generators.install()


def draw(generator: torch.Generator) -> list[float]:
    drawn: list[float] = torch.empty(3).exponential_(generator=generator).tolist()
    return drawn


def rewind(generator: torch.Generator) -> None:
    """As vLLM does it."""
    generator.set_offset(generator.get_offset() - 4)


@pytest.mark.usefixtures("installed")
def test_draws_are_those_of_other_generators() -> None:
    made = torch.Generator(device="cpu").manual_seed(3)
    assert type(made) is RewindableGenerator
    assert draw(made) == draw(torch.default_generator.clone_state().manual_seed(3))


@pytest.mark.usefixtures("installed")
def test_a_draw_of_this_step_is_taken_back_but_none_of_an_earlier_one() -> None:
    generator = torch.Generator(device="cpu")
    generator.manual_seed(3)
    first = draw(generator)
    rewind(generator)
    assert draw(generator) == first
    generators.begin_step()
    second = draw(generator)
    rewind(generator)
    assert draw(generator) == second != first


@pytest.mark.usefixtures("installed")
def test_every_generator_is_an_instance_of_the_class_in_its_place() -> None:
    assert isinstance(torch.default_generator, torch.Generator)
    assert isinstance(torch.Generator(), torch.Generator)
    assert not isinstance(3, torch.Generator)

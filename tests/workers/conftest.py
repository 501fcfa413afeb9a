"""A tiny model, and fixtures that start clusters without sockets for clients, or prefill alone, with it."""

import functools
from pathlib import Path

import pytest
import transformers

from tests.tiny_models import tiny_model
from tests.workers.decode_lab import StartDecodeLab, decode_lab
from tests.workers.mini_cluster import StartCluster, mini_cluster
from tests.workers.prefill_lab import StartLab, prefill_lab
from tests.workers.references import Reference, greedy_tokens


@pytest.fixture(scope="session")
def model() -> transformers.PreTrainedModel:
    return tiny_model("smollm2")


@pytest.fixture
def start_cluster(model: transformers.PreTrainedModel, tmp_path: Path) -> StartCluster:
    """Return a function that starts a `mini_cluster` of the model."""
    return functools.partial(mini_cluster, model, tmp_path)


@pytest.fixture
def start_decode_lab(model: transformers.PreTrainedModel, tmp_path: Path) -> StartDecodeLab:
    """Return a function that starts a `decode_lab` of the model."""
    return functools.partial(decode_lab, model, tmp_path)


@pytest.fixture
def start_lab(model: transformers.PreTrainedModel, tmp_path: Path) -> StartLab:
    """Return a function that starts a `prefill_lab` of the model."""
    return functools.partial(prefill_lab, model, tmp_path)


@pytest.fixture
def reference(model: transformers.PreTrainedModel) -> Reference:
    """Return a function that returns transformers' greedy tokens behind a prompt."""
    return functools.partial(greedy_tokens, model)

"""docs/models.md says what the code takes: its tables are compared with the code's lists."""

import re
from typing import get_args

import gguf
import numpy as np
import pytest

from conductor.front.openai.tool_calls import ToolFormat
from mooncake.config.settings import Config
from mooncake.model.architectures import ARCHITECTURES, GGUF_ARCHITECTURES
from mooncake.model.config import RopeType
from mooncake.model.gguf_tokenizer import _PRE_TOKENIZERS
from tests.documented import ROOT
from tests.tiny_models import FAMILIES
from tests.workers.execution.test_weights import WRITTEN_ENCODINGS

PAGE = (ROOT / "docs/models.md").read_text()


def column(header: str, number: int = 0) -> list[str]:
    """The words in code font in one column of the table whose first column has this header."""
    [table] = re.findall(rf"(?m)^\| {re.escape(header)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE)
    cells = [row.strip("| \n").split(" | ")[number] for row in table.splitlines()]
    return [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]


def after(words: str) -> list[str]:
    """The words in code font from here to the end of the sentence or bracket."""
    [text] = re.findall(rf"{re.escape(words)}([^.;(]*)", PAGE)
    return re.findall(r"`([\w-]+)`", text)


def can_be_dequantised(encoding: gguf.GGMLQuantizationType) -> bool:
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[encoding]
    try:
        values = gguf.dequantize(np.zeros((1, num_bytes), np.uint8), encoding)
    except NotImplementedError:
        return False
    return bool(values.shape == (1, num_values))


def test_architectures() -> None:
    assert column("`architectures` in `config.json`") == list(ARCHITECTURES)
    assert set(column("`architectures` in `config.json`", 2)) == set(GGUF_ARCHITECTURES)


def test_families_that_are_tested() -> None:
    assert column("family") == list(FAMILIES)


def test_rope_types() -> None:
    assert column("rope type") == list(get_args(RopeType))


def test_gguf_encodings() -> None:
    listed = column("encodings")
    assert len(set(listed)) == len(listed)
    readable = {encoding.name for encoding in gguf.GGMLQuantizationType if can_be_dequantised(encoding)}
    assert set(listed) == readable
    first_row = listed[: len(WRITTEN_ENCODINGS)]
    assert set(first_row) == set(WRITTEN_ENCODINGS)
    assert listed[len(WRITTEN_ENCODINGS)] not in WRITTEN_ENCODINGS


def test_gguf_tokenizers() -> None:
    assert after("`tokenizer.ggml.pre` one of") == list(_PRE_TOKENIZERS)


@pytest.mark.parametrize("parser", ToolFormat)
def test_tool_parsers(parser: ToolFormat) -> None:
    assert f"`{parser.value}`" in PAGE


def test_dtypes() -> None:
    told = re.findall(r"\w+", re.findall(r"Dense decoders of \w+ classes, in ([^(]*)", PAGE)[0])
    assert set(told) - {"or"} == set(get_args(Config.model_fields["dtype"].annotation)) - {"auto"}

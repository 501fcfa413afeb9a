"""A fixture that starts messenger processes for the tests of this folder."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.config.sections import TransportChoice
from tests.kvstore.nodes import SEGMENT_PAGE_BYTES, Node, StartNode
from tests.native import compiled as compiled


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """Yield a function that starts a messenger: `start_node(name, num_pages=..., transport=...)`.

    All messengers are ended with the test.
    """
    with contextlib.ExitStack() as nodes:

        def start(name: str, *, num_pages: int = 16, transport: TransportChoice = "auto") -> Node:
            node = Node(tmp_path, name, num_pages * SEGMENT_PAGE_BYTES + 3 * 4096, transport)
            nodes.callback(node.close)
            node.start()
            return node

        yield start

"""A fixture with a real messenger, and clients whose messages tests write by hand."""

import contextlib
from collections.abc import Iterator

import pytest

from kvstore.pool.pages import record_bytes
from kvstore.pool.segment import ALIGNMENT
from kvstore.protocol.calls import SPOKEN, RemoveBlocks, UnpinBlocks
from tests.kvstore.nodes import LAYOUT, Node
from tests.kvstore.server.sessions import KEYS, NUM_PAGES, HandMadeUser, Join


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    num_bytes = 3 * ALIGNMENT + NUM_PAGES * (LAYOUT.block_bytes + record_bytes(LAYOUT.num_layers))
    node = Node(folder, "node", num_bytes, "auto")
    with contextlib.closing(node):
        node.start()
        yield node


@pytest.fixture
def join(node: Node, capfd: pytest.CaptureFixture[str]) -> Iterator[Join]:
    """Yield a function that connects a client to a messenger.

    The messenger must outlive the test. At the end nothing may be in use, and its log must have no traceback.
    """
    users = []

    def join(serial: int = 1, versions: tuple[int, int] = SPOKEN) -> HandMadeUser:
        users.append(HandMadeUser(node, serial, versions))
        return users[-1]

    yield join
    for user in users:
        user.close()
    witness = HandMadeUser(node, serial=99)
    with contextlib.closing(witness):
        witness.call(UnpinBlocks(1, KEYS))
        witness.until(lambda s: s.num_used == s.num_leases == s.num_reservations == s.num_pins == 0)
        witness.call(RemoveBlocks(1, None))
        assert witness.stats().num_free == NUM_PAGES
    assert node.process is not None
    assert node.process.poll() is None
    assert "Traceback" not in capfd.readouterr().err

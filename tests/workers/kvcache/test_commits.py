"""Small layers are committed together, each once and in order; nothing is left behind the last one."""

import pytest

from workers.kvcache.commits import _COMMITTED_BYTES, Commits

LAYERS = range(4, 10)


class Messenger:
    """Notes what is committed: layers, pages, checksums."""

    def __init__(self, layer_bytes: int) -> None:
        self.commits: list[tuple[range, list[int], list[list[int]]]] = []
        self.of = Commits(LAYERS, layer_bytes, lambda *commit: self.commits.append(commit))

    def store(self, layers: range, pages: list[int]) -> None:
        for layer in layers:
            self.of.stored(layer, pages, [100 * page + layer for page in pages])


def whole(layers: range, pages: list[int]) -> tuple[range, list[int], list[list[int]]]:
    return layers, pages, [[100 * page + layer for layer in layers] for page in pages]


@pytest.mark.parametrize(
    ("layer_bytes", "sizes"),
    [
        (_COMMITTED_BYTES // 2, [1, 1, 1, 1, 1, 1]),
        (_COMMITTED_BYTES // 4, [2, 2, 2]),
        (_COMMITTED_BYTES // 8, [4, 2]),
        (1, [6]),
    ],
)
def test_layers_go_together_until_they_are_worth_a_message(layer_bytes: int, sizes: list[int]) -> None:
    messenger, pages = Messenger(layer_bytes), [7, 3]
    messenger.store(LAYERS, pages)
    first, expected = LAYERS.start, []
    for size in sizes:
        expected.append(whole(range(first, first + size), pages))
        first += size
    assert messenger.commits == expected


def test_other_blocks_have_commits_of_their_own() -> None:
    """Of some of them a fetch has brought the first layers."""
    messenger = Messenger(1)
    messenger.store(range(4, 7), [1, 2])
    messenger.store(range(7, 10), [1, 2, 3])
    messenger.store(LAYERS, [4])
    assert messenger.commits == [
        whole(range(4, 7), [1, 2]),
        whole(range(7, 10), [1, 2, 3]),
        whole(LAYERS, [4]),
    ]


def test_pass_that_stopped_between_two_layers_is_gone_on_with() -> None:
    messenger = Messenger(1)
    messenger.store(range(4, 7), [1, 2])
    messenger.store(range(4, 10), [3])  # the next attempt begins with blocks of which nothing is there
    messenger.store(range(7, 10), [1, 2])
    assert messenger.commits == [whole(range(4, 7), [1, 2]), whole(LAYERS, [3]), whole(range(7, 10), [1, 2])]

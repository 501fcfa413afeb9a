"""Layers whose last KV heads a helper has, against the same layers in one place: the same bits."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kernels.cpu.attention import AttentionShape, PagedAttention
from kernels.cpu.elementwise import Slots
from kernels.cpu.layer import Layer, run_layers
from kernels.cpu.library import Isa, Library
from kernels.cpu.mailbox import HelperLost, Wire
from kernels.cpu.moved_attention import AttentionHelper, AttentionOwner, MailboxShape
from kernels.cpu.passes import HostedPass
from tests.deadline import DEADLINE_S
from tests.kernels.cpu.isas import DTYPES, SUPPORTED, library_of, on_every_isa, random
from tests.kernels.cpu.test_layer import HIDDEN, weights

HEADS = AttentionShape(4, 2, 64, 0.125)
MOVED = HEADS.last(1)
PAGE_SIZE, NUM_PAGES, NUM_LAYERS = 8, 12, 2
WINDOWS = (None, 20)
ANSWERED_BYTE = 128
"""Offset of the counter of answers in a mailbox."""
QUERY_LENS, KV_LENS = (1, 3, 1, 21), (30, 9, 5, 21)
TABLES = [np.array(pages) for pages in ([5, 3, 0, 9], [1, 11], [7], [2, 10, 4])]

WIRED = pytest.mark.parametrize("is_wired", [False, True], ids=["shared", "stream"])


class Pages:
    """The pages of all layers, `[num_pages, num_kv_heads, 2, page_size, head_dim]`, in one place or split."""

    def __init__(self, dtype: torch.dtype) -> None:
        shape = (NUM_PAGES, HEADS.num_kv_heads, 2, PAGE_SIZE, HEADS.head_dim)
        self.whole = [random(shape, dtype, layer) for layer in range(NUM_LAYERS)]
        self.kept = [layer[:, :1].contiguous() for layer in self.whole]
        self.moved = [layer[:, 1:].contiguous() for layer in self.whole]


def attentions(
    library: Library, kv_layers: list[torch.Tensor], heads: AttentionShape
) -> list[PagedAttention]:
    return [
        PagedAttention(library, QUERY_LENS, KV_LENS, TABLES, kv_layer.shape, heads, window)
        for kv_layer, window in zip(kv_layers, WINDOWS, strict=True)
    ]


def slots(query_lens: Sequence[int], kv_lens: Sequence[int], tables: Sequence[np.ndarray]) -> Slots:
    """The slots of the new tokens of these sequences, with pages of `PAGE_SIZE` tokens."""
    positions = [np.arange(end - num, end) for num, end in zip(query_lens, kv_lens, strict=True)]
    pages = [table[span // PAGE_SIZE] for table, span in zip(tables, positions, strict=True)]
    angles = random((sum(query_lens), HEADS.head_dim // 2), torch.float32, 10)
    offsets = torch.from_numpy(np.concatenate(positions) % PAGE_SIZE)
    return Slots(angles.cos(), angles.sin(), torch.from_numpy(np.concatenate(pages)), offsets)


def shape_of(dtype: torch.dtype) -> MailboxShape:
    return MailboxShape(sum(QUERY_LENS), len(QUERY_LENS), NUM_PAGES, MOVED, dtype)


def ends_of(
    library: Library,
    shape: MailboxShape,
    hosted: list[torch.Tensor],
    windows: Sequence[int | None],
    timeout_s: float,
    memory: torch.Tensor | None = None,
    *,
    is_wired: bool,
) -> tuple[AttentionOwner, AttentionHelper]:
    """Both ends of one mailbox in `memory`, or of two that a stream connects."""
    memory = torch.zeros(shape.size_bytes, dtype=torch.uint8) if memory is None else memory
    if not is_wired:
        helper = AttentionHelper(library, memory, shape, hosted, windows)
        return AttentionOwner(library, memory, shape, timeout_s), helper
    near, far = socket.socketpair()
    owner = AttentionOwner(library, memory, shape, timeout_s, Wire(near, timeout_s))
    there = torch.zeros_like(memory)
    return owner, AttentionHelper(library, there, shape, hosted, windows, Wire(far, None))


def mailbox(
    library: Library,
    pages: Pages,
    dtype: torch.dtype,
    timeout_s: float = DEADLINE_S,
    memory: torch.Tensor | None = None,
    *,
    is_wired: bool = False,
) -> tuple[AttentionOwner, AttentionHelper]:
    return ends_of(library, shape_of(dtype), pages.moved, WINDOWS, timeout_s, memory, is_wired=is_wired)


@contextmanager
def hosting(helper: AttentionHelper) -> Iterator[None]:
    """The helper answers in a thread of its own."""

    def host() -> None:
        while (described := helper.await_pass()) is not None:
            helper.host(described)

    thread = threading.Thread(target=host)
    thread.start()
    try:
        yield
    finally:
        helper.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


class Layers:
    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self.layer = Layer(library, weights(library, dtype), HEADS)
        self.library, self.hidden = library, random((sum(QUERY_LENS), HIDDEN), dtype, 20)

    def run(
        self, kv_layers: list[torch.Tensor], moved: AttentionOwner | None = None, first: int = 0
    ) -> torch.Tensor:
        """The layers from `first` on, each with the same weights."""
        heads = HEADS if moved is None else HEADS.without(MOVED)
        each = list(zip(kv_layers, attentions(self.library, kv_layers, heads), strict=True))
        layers = [(self.layer, kv_layer, attention) for kv_layer, attention in each[first:]]
        if moved is not None:
            moved.begin(range(first, NUM_LAYERS), QUERY_LENS, KV_LENS, TABLES, PAGE_SIZE)
        workspace = torch.empty(len(self.hidden) * self.layer.workspace_elements, dtype=self.layer.dtype)
        return run_layers(layers, self.hidden, slots(QUERY_LENS, KV_LENS, TABLES), workspace, moved)


@WIRED
@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pass_has_the_bits_of_all_heads_in_one_place(
    isa: Isa, dtype: torch.dtype, *, is_wired: bool
) -> None:
    layers, pages = Layers(library_of(isa), dtype), Pages(dtype)
    expected = layers.run(pages.whole)
    owner, helper = mailbox(layers.library, pages, dtype, is_wired=is_wired)
    with hosting(helper):
        assert torch.equal(layers.run(pages.kept, owner), expected)
        assert torch.equal(layers.run(pages.kept, owner), expected), "the same slots are written again"
    for whole, kept, moved in zip(pages.whole, pages.kept, pages.moved, strict=True):
        assert torch.equal(torch.cat((kept, moved), dim=1), whole)


def test_a_pass_may_have_the_last_layers_alone() -> None:
    layers, pages = Layers(library_of(SUPPORTED[0]), torch.float32), Pages(torch.float32)
    expected = layers.run(pages.whole, first=1)
    owner, helper = mailbox(layers.library, pages, torch.float32)
    with hosting(helper):
        assert torch.equal(layers.run(pages.kept, owner, first=1), expected)


@WIRED
def test_a_pass_without_a_helper_ends_when_the_mailbox_is_closed_or_time_is_over(*, is_wired: bool) -> None:
    layers, pages = Layers(library_of(SUPPORTED[0]), torch.float32), Pages(torch.float32)
    silent, _silent_helper = mailbox(layers.library, pages, torch.float32, timeout_s=0.05, is_wired=is_wired)
    with pytest.raises(HelperLost):
        layers.run(pages.kept, silent)
    closed, helper = mailbox(
        layers.library, pages, torch.float32, timeout_s=100 * DEADLINE_S, is_wired=is_wired
    )
    timer = threading.Timer(0.05, helper.close)
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(HelperLost):
        layers.run(pages.kept, closed)
    assert time.monotonic() - began_s < DEADLINE_S
    assert closed.is_closed
    timer.join()


def test_a_helper_that_goes_on_after_its_loss_gets_no_pass() -> None:
    layers, pages = Layers(library_of(SUPPORTED[0]), torch.float32), Pages(torch.float32)
    memory = torch.zeros(shape_of(torch.float32).size_bytes, dtype=torch.uint8)
    owner, helper = mailbox(layers.library, pages, torch.float32, 0.05, memory)
    with pytest.raises(HelperLost):
        layers.run(pages.kept, owner)
    with hosting(helper):
        end_s = time.monotonic() + DEADLINE_S
        while not memory[ANSWERED_BYTE]:  # the layer that it was asked for before
            assert time.monotonic() < end_s
        with pytest.raises(HelperLost):
            layers.run(pages.kept, owner)


@WIRED
def test_a_pass_that_is_given_up_does_not_disturb_the_next_one(*, is_wired: bool) -> None:
    layers, pages = Layers(library_of(SUPPORTED[0]), torch.float32), Pages(torch.float32)
    expected = layers.run(pages.whole)
    owner, helper = mailbox(layers.library, pages, torch.float32, is_wired=is_wired)
    with hosting(helper):
        owner.begin(range(NUM_LAYERS), [1], [1], [np.array([0])], PAGE_SIZE)
        assert torch.equal(layers.run(pages.kept, owner), expected)


@pytest.mark.parametrize("answered", [-1, 2, 1 << 31])
def test_another_number_than_that_of_the_layer_is_no_answer(answered: int) -> None:
    layers, pages = Layers(library_of(SUPPORTED[0]), torch.float32), Pages(torch.float32)
    shape = shape_of(torch.float32)
    memory = torch.zeros(shape.size_bytes, dtype=torch.uint8)
    memory.view(torch.int64)[ANSWERED_BYTE // 8] = answered & 0xFFFFFFFF
    with pytest.raises(HelperLost):
        layers.run(pages.kept, AttentionOwner(layers.library, memory, shape, timeout_s=0.05))


def test_a_pass_that_is_longer_than_the_mailbox_is_refused() -> None:
    layers, pages = Layers(library_of(SUPPORTED[0]), torch.float32), Pages(torch.float32)
    owner, _ = mailbox(layers.library, pages, torch.float32)
    for lens, kv_lens, tables in (
        ([sum(QUERY_LENS) + 1], [30], [np.arange(4)]),
        ([1] * 5, [1] * 5, [np.arange(1)] * 5),
        ([1], [13 * PAGE_SIZE], [np.arange(13)]),
    ):
        with pytest.raises(ValueError, match="expected a pass of at most"):
            owner.begin(range(1), lens, kv_lens, tables, PAGE_SIZE)


@pytest.mark.parametrize("layers", [range(-1, 1), range(1, 99), range(2, 1)])
def test_layers_that_do_not_exist_are_refused(layers: range) -> None:
    pages = Pages(torch.float32)
    _, helper = mailbox(library_of(SUPPORTED[0]), pages, torch.float32)
    with pytest.raises(IndexError, match="layers, got"):
        helper.host(HostedPass(1, layers, [1], [1], [np.arange(1)]))

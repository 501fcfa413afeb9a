"""Layers of sequences whose first pages a helper has, against the same layers in one place."""

import numpy as np
import pytest
import torch

from kernels.cpu.attention import PagedAttention
from kernels.cpu.layer import Layer, run_layers
from kernels.cpu.library import Isa, Library
from kernels.cpu.mailbox import HelperLost
from kernels.cpu.moved_attention import AttentionHelper, AttentionOwner, MailboxShape
from tests.deadline import DEADLINE_S
from tests.kernels.cpu.isas import DTYPES, SUPPORTED, library_of, on_every_isa, random
from tests.kernels.cpu.test_layer import HIDDEN, weights
from tests.kernels.cpu.test_moved_attention import HEADS, PAGE_SIZE, WIRED, ends_of, hosting, slots

NUM_PAGES = 16
WINDOWS = (None, 20, 4)
"""The last window ends before all pages at the helper."""
QUERY_LENS, KV_LENS = (1, 3, 1, 21), (30, 20, 5, 40)
TABLES = [np.array(pages) for pages in ([5, 3, 0, 9], [1, 11, 8], [7], [2, 10, 4, 6, 12])]
NUMS_HOSTED = (3, 2, 0, 1)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6}
"""As a share of the largest result."""


class Case:
    """The layers' pages: `whole` in one place, `hosted` those at the helper."""

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        shape = (NUM_PAGES, HEADS.num_kv_heads, 2, PAGE_SIZE, HEADS.head_dim)
        self.library, self.dtype = library, dtype
        self.whole = [random(shape, dtype, layer) for layer in range(len(WINDOWS))]
        moved = np.concatenate([table[:num] for table, num in zip(TABLES, NUMS_HOSTED, strict=True)])
        self.hosted = [layer[moved].contiguous() for layer in self.whole]
        self.own = [layer.clone() for layer in self.whole]
        for layer in self.own:
            layer[moved] = float("nan")  # nobody reads them here
        self.layer = Layer(library, weights(library, dtype), HEADS)
        self.hidden = random((sum(QUERY_LENS), HIDDEN), dtype, 20)
        numbers = iter(range(len(moved)))
        self.tables_there = [np.array([next(numbers) for _ in range(num)]) for num in NUMS_HOSTED if num]

    def shape(self) -> MailboxShape:
        num_pages = sum(NUMS_HOSTED)
        return MailboxShape(sum(QUERY_LENS), len(QUERY_LENS), num_pages, HEADS, self.dtype, has_keys=True)

    def ends(self, timeout_s: float, *, is_wired: bool) -> tuple[AttentionOwner, AttentionHelper]:
        return ends_of(self.library, self.shape(), self.hosted, WINDOWS, timeout_s, is_wired=is_wired)

    def begin(self, owner: AttentionOwner) -> None:
        those = [index for index, num in enumerate(NUMS_HOSTED) if num]
        ends = np.cumsum(QUERY_LENS)
        tokens = np.concatenate([np.arange(ends[i] - QUERY_LENS[i], ends[i]) for i in those])
        query_lens, kv_lens = [QUERY_LENS[i] for i in those], [KV_LENS[i] for i in those]
        owner.begin(range(len(WINDOWS)), query_lens, kv_lens, self.tables_there, PAGE_SIZE, tokens)

    def run(self, kv_layers: list[torch.Tensor], owner: AttentionOwner | None = None) -> torch.Tensor:
        nums = NUMS_HOSTED if owner is not None else (0,) * len(NUMS_HOSTED)
        kv_lens = [kv_len - num * PAGE_SIZE for kv_len, num in zip(KV_LENS, nums, strict=True)]
        tables = [table[num:] for table, num in zip(TABLES, nums, strict=True)]
        layers = [
            (
                self.layer,
                kv_layer,
                PagedAttention(self.library, QUERY_LENS, kv_lens, tables, kv_layer.shape, HEADS, window),
            )
            for kv_layer, window in zip(kv_layers, WINDOWS, strict=True)
        ]
        if owner is not None:
            self.begin(owner)
        workspace = torch.empty(len(self.hidden) * self.layer.workspace_elements, dtype=self.dtype)
        return run_layers(layers, self.hidden, slots(QUERY_LENS, KV_LENS, TABLES), workspace, owner)


@WIRED
@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pass_has_the_result_of_all_pages_in_one_place(
    isa: Isa, dtype: torch.dtype, *, is_wired: bool
) -> None:
    case = Case(library_of(isa), dtype)
    expected, before = case.run(case.whole), [layer.clone() for layer in case.hosted]
    owner, helper = case.ends(DEADLINE_S, is_wired=is_wired)
    atol = TOLERANCE[dtype] * float(expected.abs().max())
    with hosting(helper):
        for _ in range(2):
            torch.testing.assert_close(case.run(case.own, owner), expected, rtol=0, atol=atol)
    for hosted, unchanged in zip(case.hosted, before, strict=True):
        assert torch.equal(hosted, unchanged)


@WIRED
def test_a_helper_that_does_not_answer_is_lost(*, is_wired: bool) -> None:
    case = Case(library_of(SUPPORTED[0]), torch.float32)
    owner, _silent = case.ends(0.05, is_wired=is_wired)
    with pytest.raises(HelperLost):
        case.run(case.own, owner)
    assert owner.is_closed


def test_rows_that_are_not_those_of_the_described_sequences_are_refused() -> None:
    case = Case(library_of(SUPPORTED[0]), torch.float32)
    owner, _ = case.ends(DEADLINE_S, is_wired=False)
    table = np.array([0])
    for tokens in (None, np.array([0]), np.array([0, sum(QUERY_LENS)])):
        with pytest.raises(ValueError, match="expected 2 rows below 26"):
            owner.begin(range(3), [2], [20], [table], PAGE_SIZE, tokens)

"""The CPU's attention against attention written out plainly, on every instruction set."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.cpu import library as cpu_library
from kernels.cpu.attention import HEAD_DIMS, AttentionShape, PagedAttention
from kernels.cpu.library import Isa, Library
from kernels.kv_copy import write_kv
from tests.deadline import DEADLINE_S
from tests.kernels.cpu.isas import DTYPES, SUPPORTED, library_of, on_every_isa, random

# (new tokens, tokens in all) of each sequence: decode, prompts, later chunks, few rows, one token
SEQUENCES = [(1, 20), (40, 40), (1, 300), (17, 203), (1, 1), (130, 180), (2, 70), (3, 3)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """Sequences in shuffled pages; what no sequence has written is NaN."""

    heads: AttentionShape
    query: torch.Tensor
    kv_layer: torch.Tensor
    tables: list[np.ndarray]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def attend(
        self,
        library: Library,
        sequences: list[tuple[int, int]],
        which: list[int],
        rows: slice,
        window: int | None,
    ) -> torch.Tensor:
        """`sequences`, which are `which` of the case's, over `rows` of its queries."""
        tables = [self.tables[i] for i in which]
        query_lens, kv_lens = zip(*sequences, strict=True)
        attention = PagedAttention(
            library, query_lens, kv_lens, tables, self.kv_layer.shape, self.heads, window
        )
        return attention(self.query[rows], self.kv_layer)


def make_case(heads: AttentionShape, page_size: int, dtype: torch.dtype) -> Case:
    used = [-(-kv_len // page_size) for _, kv_len in SEQUENCES]
    shuffled = torch.randperm(sum(used) + 3, generator=torch.Generator().manual_seed(1))
    shape = (len(shuffled), heads.num_kv_heads, 2, page_size, heads.head_dim)
    kv_layer = torch.full(shape, float("nan"), dtype=dtype)
    tables = [table.numpy() for table in shuffled[: sum(used)].split(used)]
    keys, values = [], []
    for seed, (table, (_, kv_len)) in enumerate(zip(tables, SEQUENCES, strict=True)):
        keys.append(random((kv_len, heads.num_kv_heads, heads.head_dim), dtype, seed))
        values.append(random((kv_len, heads.num_kv_heads, heads.head_dim), dtype, 100 + seed))
        token = torch.arange(kv_len)
        pages = torch.from_numpy(table)[token // page_size]
        write_kv(kv_layer, keys[-1], values[-1], pages, token % page_size)
    num_tokens = sum(query_len for query_len, _ in SEQUENCES)
    query = random((num_tokens, heads.num_heads, heads.head_dim), dtype, 7)
    return Case(heads, query, kv_layer, tables, keys, values)


def naive(case: Case, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Results and logarithms of the denominators, in float64."""
    results, logarithms = [], []
    queries = case.query.double().split([query_len for query_len, _ in SEQUENCES])
    group = case.heads.num_heads // case.heads.num_kv_heads
    for query, keys, values in zip(queries, case.keys, case.values, strict=True):
        keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * case.heads.scale
        query_at = torch.arange(len(keys) - len(query), len(keys))[:, None]
        key_at = torch.arange(len(keys))[None]
        is_seen = key_at <= query_at
        if window is not None:
            is_seen &= key_at > query_at - window
        scores = scores.masked_fill(~is_seen, float("-inf"))
        results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        logarithms.append(scores.logsumexp(-1).T)
    return torch.cat(results), torch.cat(logarithms)


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(3, 3), (1, 1), (2, 7)])
@pytest.mark.parametrize(("page_size", "window"), [(32, None), (64, 24), (5, 1), (100, 200), (8, None)])
def test_equals_naive_attention(
    isa: Isa,
    dtype: torch.dtype,
    head_dim: int,
    num_kv_heads: int,
    group: int,
    page_size: int,
    window: int | None,
) -> None:
    heads = AttentionShape(num_kv_heads * group, num_kv_heads, head_dim, 0.2)
    case = make_case(heads, page_size, dtype)
    expected, expected_lse = naive(case, window)
    query_lens, kv_lens = zip(*SEQUENCES, strict=True)
    attention = PagedAttention(
        library_of(isa), query_lens, kv_lens, case.tables, case.kv_layer.shape, heads, window
    )
    lse = torch.empty(case.query.shape[:2])
    result = attention(case.query, case.kv_layer, lse)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-3)


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "window"), [(32, None), (8, 24), (5, 70), (16, 1)])
def test_attention_to_the_first_keys_and_to_the_others_is_attention_to_all(
    isa: Isa, dtype: torch.dtype, page_size: int, window: int | None
) -> None:
    heads = AttentionShape(6, 2, 64, 0.2)
    case = make_case(heads, page_size, dtype)
    expected, expected_lse = naive(case, window)
    ends = np.cumsum([query_len for query_len, _ in SEQUENCES])
    for (query_len, kv_len), table, end in zip(SEQUENCES, case.tables, ends, strict=True):
        rows = slice(int(end) - query_len, int(end))
        for num in {1, (kv_len - query_len) // page_size}:
            if not 0 < num * page_size <= kv_len - query_len:
                continue
            query, shape, results = case.query[rows], case.kv_layer.shape, []
            for kv, pages, num_keys in (
                (kv_len, table[:num], [num * page_size]),
                (kv_len - num * page_size, table[num:], None),
            ):
                part = PagedAttention(
                    library_of(isa), [query_len], [kv], [pages], shape, heads, window, num_keys
                )
                lse = torch.empty(query.shape[:2])
                results.append((part(query, case.kv_layer, lse).double(), lse.double()))
            (first, first_lse), (other, other_lse) = results
            lse = torch.logaddexp(first_lse, other_lse)
            merged = first * (first_lse - lse).exp()[..., None] + other * (other_lse - lse).exp()[..., None]
            torch.testing.assert_close(merged, expected[rows], rtol=0, atol=TOLERANCE[dtype])
            torch.testing.assert_close(lse, expected_lse[rows], rtol=0, atol=1e-3)


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [None, 40])
def test_a_token_has_the_same_bits_however_its_sequence_is_cut_and_batched(
    isa: Isa, dtype: torch.dtype, head_dim: int, window: int | None
) -> None:
    library = library_of(isa)
    case = make_case(AttentionShape(6, 2, head_dim, head_dim**-0.5), 32, dtype)
    whole = case.attend(library, SEQUENCES, list(range(len(SEQUENCES))), slice(None), window)
    which, first = 5, sum(query_len for query_len, _ in SEQUENCES[:5])
    query_len, kv_len = SEQUENCES[which]
    expected = whole[first : first + query_len]
    for chunk_size in (1, 2, 7, 33, 64, 129):
        chunks = []
        for begin in range(0, query_len, chunk_size):
            end = min(begin + chunk_size, query_len)
            rows = slice(first + begin, first + end)
            # Beside another sequence, which comes first or last.
            alone = [(end - begin, kv_len - query_len + end)]
            chunks.append(case.attend(library, alone, [which], rows, window))
        assert torch.equal(torch.cat(chunks), expected), chunk_size


@on_every_isa
def test_queries_may_be_a_part_of_a_larger_matrix(isa: Isa) -> None:
    case = make_case(AttentionShape(4, 2, 64, 0.1), 16, torch.float32)
    wide = torch.cat((case.query, random(case.query.shape, torch.float32)), dim=1)
    expected = case.attend(library_of(isa), SEQUENCES, list(range(len(SEQUENCES))), slice(None), None)
    case.query = wide[:, :4]
    result = case.attend(library_of(isa), SEQUENCES, list(range(len(SEQUENCES))), slice(None), None)
    assert torch.equal(result, expected)


class TestRefuses:
    heads = AttentionShape(4, 2, 64, 0.1)
    shape = (8, 2, 2, 16, 64)

    def plan(self, query_len: int = 2, kv_len: int = 20, **changes: object) -> PagedAttention:
        arguments = {
            "page_tables": [np.array([3, 1])],
            "kv_shape": self.shape,
            "heads": self.heads,
            "sliding_window": None,
            **changes,
        }
        return PagedAttention(library_of(SUPPORTED[0]), [query_len], [kv_len], **arguments)  # type: ignore[arg-type]

    @pytest.mark.parametrize(("query_len", "kv_len"), [(0, 5), (6, 5), (1, 33)])
    def test_lengths_that_do_not_fit(self, query_len: int, kv_len: int) -> None:
        with pytest.raises(ValueError, match=f"got {query_len}, {kv_len} and 2 pages of 16"):
            self.plan(query_len, kv_len)

    @pytest.mark.parametrize("pages", [[3, 8], [-1, 2]])
    def test_pages_that_do_not_exist(self, pages: list[int]) -> None:
        with pytest.raises(ValueError, match=r"expected pages in \[0, 8\)"):
            self.plan(page_tables=[np.array(pages)])

    def test_pages_behind_the_last_token_are_not_looked_at(self) -> None:
        self.plan(page_tables=[np.array([3, 1, 99])])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"heads": AttentionShape(4, 2, 96, 0.1)}, "expected pages of AttentionShape"),
            ({"heads": AttentionShape(3, 2, 64, 0.1)}, "that KV heads divide"),
            (
                {"heads": AttentionShape(4, 2, 32, 0.1), "kv_shape": (8, 2, 2, 16, 32)},
                r"of \(64, 96, 128\) dimensions",
            ),
            ({"sliding_window": 0}, "sees itself at least"),
            ({"page_tables": []}, "as many lengths as page tables"),
        ],
    )
    def test_what_does_not_fit_together(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.plan(**changes)

    @pytest.mark.parametrize(
        ("query", "kv_layer", "message"),
        [
            (torch.zeros(3, 4, 64), torch.zeros(shape), "expected queries"),
            (torch.zeros(2, 64, 4).transpose(1, 2), torch.zeros(shape), "expected queries"),
            (torch.zeros(2, 4, 64), torch.zeros(9, 2, 2, 16, 64), "expected queries"),
            (torch.zeros(2, 4, 64), torch.zeros(shape, dtype=torch.bfloat16), "of one type"),
            (torch.zeros(2, 4, 64).double(), torch.zeros(shape).double(), "of one type"),
        ],
    )
    def test_tensors_of_another_shape_or_type(
        self, query: torch.Tensor, kv_layer: torch.Tensor, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            self.plan()(query, kv_layer)
        with pytest.raises(ValueError, match="for lse"):
            self.plan()(torch.zeros(2, 4, 64), torch.zeros(self.shape), torch.zeros(2, 3))


@pytest.mark.parametrize(("isa", "num_keys"), [(Isa.AVX512, 32), (Isa.AVX2, 8)], ids=str)
def test_blocks_of_keys_whose_scores_would_leave_their_row_do_not_compile(
    isa: Isa, num_keys: int, tmp_path: Path
) -> None:
    sources = shutil.copytree(Path(cpu_library.__file__).parent / "native", tmp_path / "native")
    blocks = sources / "attention_blocks.h"
    text = blocks.read_text()
    assert "KEYS = 64;" in text
    blocks.write_text(text.replace("KEYS = 64;", f"KEYS = {num_keys};"))
    flags = ("-std=c++17", "-fsyntax-only", "-x", "c++", *cpu_library._ARCHITECTURE[isa])
    command = [os.environ.get("CXX") or "c++", *flags, str(sources / "attention_decode.h")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode != 0
    assert "behind a row of scores" in done.stderr

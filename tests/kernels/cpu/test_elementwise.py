"""Norm, rotation and page write against torch, on every instruction set."""

import pytest
import torch
from torch.nn.functional import rms_norm

from kernels.cpu.elementwise import Elementwise, Slots
from kernels.cpu.library import Isa
from kernels.head_norms import HeadNorms
from tests.kernels.cpu.isas import DTYPES, SUPPORTED, library_of, on_every_isa, random

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "n"), [(1, 16), (5, 48), (3, 576)])
def test_rms_norm(isa: Isa, dtype: torch.dtype, num_rows: int, n: int) -> None:
    x, weight = random((num_rows, n), dtype), random((n,), dtype, 1)
    expected = rms_norm(x.double(), (n,), weight.double(), 1e-5)
    result = Elementwise(library_of(isa), dtype).rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(result.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


def slots(num_tokens: int, head_dim: int, page_size: int, num_pages: int) -> Slots:
    places = torch.randperm(num_pages * page_size, generator=torch.Generator().manual_seed(2))[:num_tokens]
    angles = 3 * random((num_tokens, head_dim // 2), torch.float32, 3)
    return Slots(angles.cos(), angles.sin(), places // page_size, places % page_size)


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("with_norms", [False, True])
def test_rotate_and_write(isa: Isa, dtype: torch.dtype, head_dim: int, with_norms: bool) -> None:
    num_tokens, num_heads, num_kv_heads, page_size, num_pages = 13, 5, 2, 6, 4
    qkv = random((num_tokens, num_heads + 2 * num_kv_heads, head_dim), dtype)
    kv_layer = random((num_pages, num_kv_heads, 2, page_size, head_dim), dtype, 1)
    where = slots(num_tokens, head_dim, page_size, num_pages)
    norms = (
        HeadNorms(random((head_dim,), dtype, 4), random((head_dim,), dtype, 5), 1e-6) if with_norms else None
    )

    heads = qkv.double()[:, : num_heads + num_kv_heads]
    if norms is not None:
        query, key = heads[:, :num_heads], heads[:, num_heads:]
        query = rms_norm(query, (head_dim,), norms.query.double(), norms.eps)
        heads = torch.cat((query, rms_norm(key, (head_dim,), norms.key.double(), norms.eps)), dim=1)
    a, b = heads.chunk(2, dim=-1)
    cos, sin = where.cos[:, None].double(), where.sin[:, None].double()
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    expected = kv_layer.double()
    expected[where.pages, :, 0, where.offsets] = rotated[:, num_heads:]
    expected[where.pages, :, 1, where.offsets] = qkv.double()[:, num_heads + num_kv_heads :]

    Elementwise(library_of(isa), dtype).rotate_and_write(qkv, kv_layer, where, norms)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(qkv[:, :num_heads].double(), rotated[:, :num_heads], **tolerance)
    torch.testing.assert_close(kv_layer.double(), expected, **tolerance)


class TestRefuses:
    each = Elementwise(library_of(SUPPORTED[0]), torch.float32)

    def test_sizes_that_are_not_multiples(self) -> None:
        with pytest.raises(ValueError, match="multiple of 16 elements, got 24"):
            self.each.rms_norm(torch.zeros(2, 24), torch.zeros(24), 1e-5)

    def test_another_dtype(self) -> None:
        with pytest.raises(ValueError, match="expected one of"):
            Elementwise(library_of(SUPPORTED[0]), torch.float16)
        with pytest.raises(ValueError, match="expected x as contiguous"):
            self.each.rms_norm(torch.zeros(2, 16).bfloat16(), torch.zeros(16), 1e-5)

    @pytest.mark.parametrize(("page", "offset"), [(4, 0), (-1, 0), (0, 6), (0, -1)])
    def test_slots_outside_of_the_pages(self, page: int, offset: int) -> None:
        where = slots(2, 64, 6, 4)
        where.pages[1], where.offsets[1] = page, offset
        with pytest.raises(ValueError, match="expected slots in 4 pages of 6 tokens"):
            self.each.rotate_and_write(torch.zeros(2, 5, 64), torch.zeros(4, 1, 2, 6, 64), where)

    def test_angles_of_other_tokens(self) -> None:
        with pytest.raises(ValueError, match="of 3 tokens for a head_dim of 64, got those of 2 for 64"):
            self.each.rotate_and_write(torch.zeros(3, 5, 64), torch.zeros(4, 1, 2, 6, 64), slots(2, 64, 6, 4))
        with pytest.raises(ValueError, match="expected sin"):
            Slots(torch.zeros(2, 32), torch.zeros(2, 31), torch.tensor([0, 1]), torch.tensor([0, 1]))

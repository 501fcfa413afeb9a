"""Copies of pages by the compiled code, against torch."""

import pytest
import torch

from kernels.cpu.library import Isa
from kernels.cpu.page_copy import PageCopies
from tests.kernels.cpu.isas import DTYPES, SUPPORTED, library_of, on_every_isa, random

LIBRARY = library_of(SUPPORTED[0])
PAGES = [7, 0, 3, 4]


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_a_tensor_are_copied_to_two_and_back(isa: Isa, dtype: torch.dtype) -> None:
    library = library_of(isa)
    whole = random((9, 3, 2, 4, 5), dtype)
    first, second = torch.zeros((8, 2, 2, 4, 5), dtype=dtype), torch.zeros((11, 1, 2, 4, 5), dtype=dtype)
    parts = [(whole[:, :2], first), (whole[:, 2:], second)]
    copies = PageCopies(library, parts)
    assert copies.page_bytes == whole[0].nbytes
    copies.copy(PAGES)
    for page in range(8):
        expected = whole[page] if page in PAGES else torch.zeros_like(whole[page])
        assert torch.equal(torch.cat((first[page], second[page])), expected)
    assert not second[8:].any()
    back = torch.zeros_like(whole)
    PageCopies(library, [(first, back[:, :2]), (second, back[:, 2:])]).copy(PAGES)
    assert torch.equal(back[PAGES], whole[PAGES])


def test_pages_that_one_of_the_tensors_does_not_have_are_refused() -> None:
    whole, fewer = torch.zeros((9, 3, 2)), torch.zeros((8, 3, 2))
    copies = PageCopies(LIBRARY, [(whole, fewer)])
    copies.copy([])
    for pages, told in (([8], "8 to 8 of 8"), ([0, -1], "-1 to 0 of 9")):
        with pytest.raises(IndexError, match=told):
            copies.copy(pages)
    with pytest.raises(IndexError, match="2 pages to 1"):
        copies.copy([0, 1], [2])


def test_some_parts_of_pages_are_copied_to_other_numbers() -> None:
    first, second = random((9, 3, 2), torch.float32), random((9, 3, 2), torch.float32, 1)
    staged = torch.zeros((2, 4, 3, 2))
    copies = PageCopies(LIBRARY, [(first, staged[0]), (second, staged[1])])
    copies.copy([7, 0, 3], range(1, 4), range(1, 2))
    assert torch.equal(staged[1, 1:], second[[7, 0, 3]])
    assert not staged[0].any()
    assert not staged[1, 0].any()


def test_tensors_whose_pages_are_not_alike_are_refused() -> None:
    whole = torch.zeros((9, 3, 2))
    for other in (torch.zeros((9, 2, 2)), torch.zeros((9, 3, 2), dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"pages of torch\.float32"):
            PageCopies(LIBRARY, [(whole, other)])
    with pytest.raises(ValueError, match="one piece"):
        PageCopies(LIBRARY, [(whole, torch.zeros((9, 2, 3)).transpose(1, 2))])

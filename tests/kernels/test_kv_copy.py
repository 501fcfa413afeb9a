"""Copies between tokens, device pages and blocks."""

import torch

from kernels.kv_copy import gather_pages, scatter_pages, write_kv
from mooncake.messages.blocks import KVLayout


def test_a_gathered_page_is_byte_for_byte_one_layer_of_a_block() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=4, block_size=8, dtype="bfloat16")
    kv_layer = torch.zeros(5, 2, 2, 8, 4, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 8, 2, 4, generator=torch.Generator().manual_seed(0)).bfloat16().unbind()
    write_kv(kv_layer, keys, values, torch.full((8,), 3), torch.arange(8))
    block = gather_pages(kv_layer, torch.tensor([3]))
    assert block.is_contiguous()
    assert block.numel() * block.element_size() == layout.layer_bytes
    # [kv_head][K, V][token][head_dim]
    expected = torch.stack([torch.stack([keys[:, head], values[:, head]]) for head in range(2)])
    assert torch.equal(block.flatten(), expected.flatten())


def test_scattered_blocks_come_back_in_order_and_touch_no_other_page() -> None:
    kv_layer = torch.zeros(6, 1, 2, 4, 2)
    blocks = torch.randn(3, 1, 2, 4, 2, generator=torch.Generator().manual_seed(0))
    scatter_pages(kv_layer, torch.tensor([4, 0, 2]), blocks)
    assert torch.equal(gather_pages(kv_layer, torch.tensor([4, 0, 2])), blocks)
    assert not gather_pages(kv_layer, torch.tensor([1, 3, 5])).any()


def test_write_kv_leaves_the_other_offsets_of_a_page_alone() -> None:
    kv_layer = torch.ones(2, 1, 2, 4, 2)
    write_kv(kv_layer, torch.zeros(1, 1, 2), torch.full((1, 1, 2), 7.0), torch.tensor([1]), torch.tensor([2]))
    assert kv_layer[1, 0, 0, :, 0].tolist() == [1, 1, 0, 1]
    assert kv_layer[1, 0, 1, :, 0].tolist() == [1, 1, 7, 1]
    assert bool((kv_layer[0] == 1).all())

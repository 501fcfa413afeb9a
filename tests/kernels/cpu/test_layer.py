"""A layer in one call against its parts (whole models: tests/workers/engine/layers/test_cpu.py)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.cpu.attention import AttentionShape, PagedAttention
from kernels.cpu.elementwise import Elementwise, Slots
from kernels.cpu.layer import Layer, PackedLayerWeights, run_layers
from kernels.cpu.library import Isa, Library
from kernels.cpu.linear import GatedLinear, PackedLinear
from kernels.cpu.mailbox import COUNTERS_BYTES, Mailbox
from kernels.head_norms import HeadNorms
from tests.kernels.cpu.isas import DTYPES, SUPPORTED, library_of, on_every_isa, random

HEADS = AttentionShape(4, 2, 64, 0.125)
HIDDEN, INNER, NUM_TOKENS = 48, 80, 11
KV_SHAPE = (3, 2, 2, 8, 64)
COMPUTED_BYTE = 256
"""Offset of the counter of computed layers in a mailbox."""


def weights(library: Library, dtype: torch.dtype) -> PackedLayerWeights:
    def linear(out_features: int, in_features: int, seed: int) -> PackedLinear:
        return PackedLinear(library, 0.2 * random((out_features, in_features), dtype, seed))

    return PackedLayerWeights(
        random((HIDDEN,), dtype, 1),
        linear(8 * 64, HIDDEN, 2),
        HeadNorms(random((64,), dtype, 3), random((64,), dtype, 4), 1e-6),
        linear(HIDDEN, 4 * 64, 5),
        random((HIDDEN,), dtype, 6),
        GatedLinear(library, linear(INNER, HIDDEN, 7), linear(INNER, HIDDEN, 8)),
        linear(HIDDEN, INNER, 9),
        1e-5,
    )


def batch(library: Library) -> tuple[PagedAttention, Slots]:
    table = np.array([2, 0])
    attention = PagedAttention(library, [NUM_TOKENS], [NUM_TOKENS], [table], KV_SHAPE, HEADS)
    token = torch.arange(NUM_TOKENS)
    angles = random((NUM_TOKENS, 32), torch.float32, 10)
    return attention, Slots(angles.cos(), angles.sin(), torch.from_numpy(table)[token // 8], token % 8)


def attended(
    library: Library,
    w: PackedLayerWeights,
    hidden: torch.Tensor,
    kv_layer: torch.Tensor,
    attention: PagedAttention,
    slots: Slots,
    *residual: torch.Tensor,
) -> torch.Tensor:
    """The first half of a layer, by its parts."""
    each = Elementwise(library, hidden.dtype)
    assert w.head_norms is not None
    qkv = w.qkv(each.rms_norm(hidden, w.input_norm, w.eps)).view(NUM_TOKENS, 8, 64)
    each.rotate_and_write(qkv, kv_layer, slots, replace(w.head_norms, eps=w.eps))
    return w.o(attention(qkv[:, :4], kv_layer).view(NUM_TOKENS, -1), *residual)


def transformed(
    library: Library, w: PackedLayerWeights, hidden: torch.Tensor, *residual: torch.Tensor
) -> torch.Tensor:
    """The second half of a layer, by its parts."""
    each = Elementwise(library, hidden.dtype)
    return w.down(w.gated(each.rms_norm(hidden, w.post_norm, w.eps)), *residual)


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_has_the_bits_of_its_parts(isa: Isa, dtype: torch.dtype) -> None:
    library = library_of(isa)
    w, (attention, slots) = weights(library, dtype), batch(library)
    hidden = random((NUM_TOKENS, HIDDEN), dtype)
    layer = Layer(library, w, HEADS)
    kv_layer, kv_expected = torch.zeros(2, *KV_SHAPE, dtype=dtype)
    workspace = torch.full((NUM_TOKENS * layer.workspace_elements,), float("nan"), dtype=dtype)
    result = layer(hidden, kv_layer, attention, slots, workspace)

    middle = attended(library, w, hidden, kv_expected, attention, slots, hidden)
    assert torch.equal(result, transformed(library, w, middle, middle))
    assert torch.equal(kv_layer, kv_expected)


@on_every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_half_has_the_bits_of_its_parts_without_the_residual(isa: Isa, dtype: torch.dtype) -> None:
    library = library_of(isa)
    w, (attention, slots) = weights(library, dtype), batch(library)
    hidden = random((NUM_TOKENS, HIDDEN), dtype)
    layer = Layer(library, w, HEADS)
    kv_layer, kv_expected = torch.zeros(2, *KV_SHAPE, dtype=dtype)
    workspace = torch.full((NUM_TOKENS * layer.workspace_elements,), float("nan"), dtype=dtype)

    expected = attended(library, w, hidden, kv_expected, attention, slots)
    assert torch.equal(layer.attention_half(hidden, kv_layer, attention, slots, workspace), expected)
    assert torch.equal(kv_layer, kv_expected)
    workspace.fill_(float("nan"))
    assert torch.equal(layer.mlp_half(hidden, workspace), transformed(library, w, hidden))


def test_the_owner_of_a_pass_is_told_of_each_layer() -> None:
    library = library_of(SUPPORTED[0])
    layer, (attention, slots) = Layer(library, weights(library, torch.float32), HEADS), batch(library)
    memory = torch.zeros(COUNTERS_BYTES, dtype=torch.uint8)
    run_layers(
        [(layer, torch.zeros(KV_SHAPE), attention)] * 3,
        torch.zeros(NUM_TOKENS, HIDDEN),
        slots,
        torch.zeros(NUM_TOKENS * layer.workspace_elements),
        owner=Mailbox(library, memory, COUNTERS_BYTES),
    )
    assert memory.view(torch.int32)[COMPUTED_BYTE // 4] == 3


class TestRefuses:
    library = library_of(SUPPORTED[0])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"input_norm": torch.zeros(47)}, r"a norm of torch.float32 \[48\], got torch.float32 \[47\]"),
            ({"post_norm": torch.zeros(48).bfloat16()}, "a norm of torch.float32"),
            ({"o": PackedLinear(library, torch.zeros(48, 128))}, r"o of torch.float32 \[48, 256\]"),
            ({"down": PackedLinear(library, torch.zeros(48, 96))}, r"gated of torch.float32 \[96, 48\]"),
        ],
    )
    def test_weights_that_do_not_fit_together(self, changes: dict[str, object], message: str) -> None:
        w = replace(weights(self.library, torch.float32), **changes)
        with pytest.raises(ValueError, match=message):
            Layer(self.library, w, HEADS)

    def test_tensors_that_do_not_fit(self) -> None:
        layer = Layer(self.library, weights(self.library, torch.float32), HEADS)
        attention, slots = batch(self.library)
        hidden, kv_layer = torch.zeros(NUM_TOKENS, HIDDEN), torch.zeros(KV_SHAPE)
        workspace = torch.zeros(NUM_TOKENS * layer.workspace_elements)
        layer(hidden, kv_layer, attention, slots, workspace)
        with pytest.raises(ValueError, match="expected hidden states"):
            layer(hidden[1:], kv_layer, attention, slots, workspace)
        with pytest.raises(ValueError, match="expected pages"):
            layer(hidden, kv_layer[1:], attention, slots, workspace)
        with pytest.raises(ValueError, match="expected workspace"):
            layer(hidden, kv_layer, attention, slots, workspace[1:])
        with pytest.raises(ValueError, match="expected hidden states"):
            layer.mlp_half(hidden[:, 1:], workspace)
        with pytest.raises(ValueError, match="expected workspace"):
            layer.mlp_half(hidden[1:], workspace)
        slots.pages[3] = 3
        with pytest.raises(ValueError, match="expected slots in pages"):
            layer.attention_half(hidden, kv_layer, attention, slots, workspace)
        with pytest.raises(ValueError, match="expected slots in pages"):
            layer(hidden, kv_layer, attention, slots, workspace)

    def test_a_batch_of_other_tokens(self) -> None:
        layer = Layer(self.library, weights(self.library, torch.float32), HEADS)
        other = PagedAttention(self.library, [3], [3], [np.array([0])], KV_SHAPE, HEADS)
        workspace = torch.zeros(NUM_TOKENS * layer.workspace_elements)
        with pytest.raises(ValueError, match=r"of 11 tokens for .* got 3"):
            layer(
                torch.zeros(NUM_TOKENS, HIDDEN),
                torch.zeros(KV_SHAPE),
                other,
                batch(self.library)[1],
                workspace,
            )

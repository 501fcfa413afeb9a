"""Decoder layers of the Llama family in one call on the CPU (layer.h).

The same kernels as in `attention`, `linear` and `elementwise`, in order: norm, products for queries, keys and
values, rotation and page write, attention, product, norm, gated products, product, with both residuals. All
layers of a pass are one call. With nine calls for each of thirty layers, Python would take 1.4 ms a step, a
fifth of a decode step of a small model, and might wait between two calls for the interpreter's lock. The
halves of a layer, attention and MLP, can be called alone, without their residuals. In a tensor-parallel group
each rank has its own heads and columns, and the group adds up the ranks' results.

Owns: a layer's weights, packed, and the checks. Does not know: which layer it is.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch

from kernels.cpu.attention import AttentionShape, PagedAttention
from kernels.cpu.elementwise import MULTIPLE, Slots
from kernels.cpu.library import Library
from kernels.cpu.linear import GatedLinear, PackedLinear
from kernels.cpu.mailbox import Mailbox
from kernels.cpu.moved_attention import AttentionOwner
from kernels.head_norms import HeadNorms


class _Weights(ctypes.Structure):
    """The C++ `struct LayerWeights` of layer.h."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", c_void_p),
        ("qkv_bias", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("o", c_void_p),
        ("o_bias", c_void_p),
        ("post_norm", c_void_p),
        ("gate", c_void_p),
        ("up", c_void_p),
        ("gate_bias", c_void_p),
        ("up_bias", c_void_p),
        ("down", c_void_p),
        ("down_bias", c_void_p),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("eps", c_float),
    )


class _LayerOfPass(ctypes.Structure):
    """The C++ `struct LayerOfPass` of layer.h."""

    _fields_ = (("weights", c_void_p), ("batch", c_void_p), ("kv", c_void_p))


@dataclass(frozen=True, slots=True)
class PackedLayerWeights:
    """The packed weights of a layer.

    `qkv` stacks queries, keys and values. `input_norm` and `post_norm` are `[hidden_size]`. `eps` is the
    epsilon of all norms. `head_norms` is None if the model has none.
    """

    input_norm: torch.Tensor
    qkv: PackedLinear
    head_norms: HeadNorms | None
    o: PackedLinear
    post_norm: torch.Tensor
    gated: GatedLinear
    down: PackedLinear
    eps: float


class Layer:
    """One decoder layer with its packed weights. Raises ValueError for weights that do not fit together."""

    def __init__(self, library: Library, weights: PackedLayerWeights, heads: AttentionShape) -> None:
        hidden_size, inner = weights.o.out_features, weights.down.in_features
        query_size = heads.num_heads * heads.head_dim
        qkv_size = query_size + 2 * heads.num_kv_heads * heads.head_dim
        expected: list[tuple[str, PackedLinear | GatedLinear, tuple[int, int]]] = [
            ("qkv", weights.qkv, (qkv_size, hidden_size)),
            ("o", weights.o, (hidden_size, query_size)),
            ("gated", weights.gated, (inner, hidden_size)),
            ("down", weights.down, (hidden_size, inner)),
        ]
        self.dtype = weights.qkv.dtype
        for name, matrix, shape in expected:
            if (matrix.out_features, matrix.in_features) != shape or matrix.dtype is not self.dtype:
                raise ValueError(
                    f"expected {name} of {self.dtype} {list(shape)}, "
                    f"got {matrix.dtype} {[matrix.out_features, matrix.in_features]}"
                )
        vectors = [(hidden_size, weights.input_norm), (hidden_size, weights.post_norm)]
        if weights.head_norms is not None:
            vectors += [(heads.head_dim, norm) for norm in (weights.head_norms.query, weights.head_norms.key)]
        for size, norm in vectors:
            if (
                norm.shape != (size,)
                or norm.dtype is not self.dtype
                or not norm.is_contiguous()
                or not norm.is_cpu
            ):
                raise ValueError(
                    f"expected a norm of {self.dtype} [{size}], got {norm.dtype} {list(norm.shape)}"
                )
        if hidden_size % MULTIPLE or inner % MULTIPLE:
            raise ValueError(
                f"expected sizes that are multiples of {MULTIPLE}, got {hidden_size} and {inner}"
            )
        self.hidden_size = hidden_size
        self.heads = heads
        self.workspace_elements = max(hidden_size, query_size) + qkv_size + inner
        """Elements of workspace for each token, of the layer's dtype."""
        self._sizes = (self.dtype, hidden_size, inner, heads)
        self._weights = weights  # the C++ code reads them by address
        norms = weights.head_norms
        self._struct = _Weights(
            weights.input_norm.data_ptr(),
            weights.qkv.address,
            weights.qkv.bias_address,
            None if norms is None else norms.query.data_ptr(),
            None if norms is None else norms.key.data_ptr(),
            weights.o.address,
            weights.o.bias_address,
            weights.post_norm.data_ptr(),
            weights.gated.gate.address,
            weights.gated.up.address,
            weights.gated.gate.bias_address,
            weights.gated.up.bias_address,
            weights.down.address,
            weights.down.bias_address,
            hidden_size,
            inner,
            weights.eps,
        )
        self._address = ctypes.addressof(self._struct)
        self._layers = library.function("layers", self.dtype, c_void_p, c_int64, *[c_void_p] * 6)
        self._attention_half = library.function("attention_half", self.dtype, *[c_void_p] * 7)
        self._mlp_half = library.function("mlp_half", self.dtype, c_void_p, c_int64, *[c_void_p] * 3)

    @property
    def packed(self) -> list[torch.Tensor]:
        """The packed memory of each matrix of the layer."""
        weights = self._weights
        matrices = (weights.qkv, weights.o, weights.gated.gate, weights.gated.up, weights.down)
        return [matrix.packed for matrix in matrices]

    def __call__(
        self,
        hidden: torch.Tensor,
        kv_layer: torch.Tensor,
        attention: PagedAttention,
        slots: Slots,
        workspace: torch.Tensor,
    ) -> torch.Tensor:
        """Return `hidden` [T, hidden_size] after this layer.

        The keys and values of the tokens are written to `kv_layer`. `workspace`: `workspace_elements`
        elements for each token, any content. Raises ValueError for other shapes or dtypes, and for slots
        outside the pages.
        """
        return run_layers([(self, kv_layer, attention)], hidden, slots, workspace)

    def attention_half(
        self,
        hidden: torch.Tensor,
        kv_layer: torch.Tensor,
        attention: PagedAttention,
        slots: Slots,
        workspace: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output of the attention half for `hidden` [T, hidden_size], without the residual.

        The half is norm, attention and output product. Raises ValueError for other shapes or dtypes.
        """
        self._check_pass(hidden, kv_layer, attention, slots, workspace)
        out = torch.empty_like(hidden)
        is_written = self._attention_half(
            self._address,
            attention.address,
            slots.address,
            hidden.data_ptr(),
            kv_layer.data_ptr(),
            out.data_ptr(),
            workspace.data_ptr(),
        )
        _check_written(is_written, kv_layer, slots)
        return out

    def mlp_half(self, hidden: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP half for `hidden` [T, hidden_size], without the residual.

        The half is norm and MLP. Raises ValueError for other shapes or dtypes.
        """
        num_tokens = len(hidden)
        self._check("hidden states", hidden, (num_tokens, self.hidden_size))
        self._check("workspace", workspace, (num_tokens * self.workspace_elements,))
        out = torch.empty_like(hidden)
        self._mlp_half(
            self._address,
            num_tokens,
            hidden.data_ptr(),
            out.data_ptr(),
            workspace.data_ptr(),
        )
        return out

    def _check_pass(
        self,
        hidden: torch.Tensor,
        kv_layer: torch.Tensor,
        attention: PagedAttention,
        slots: Slots,
        workspace: torch.Tensor,
        helped: AttentionOwner | None = None,
    ) -> None:
        num_tokens, heads = len(slots), self.heads
        if helped is not None and helped.shape.moved_heads is not None:
            heads = heads.without(helped.shape.moved_heads)
        if helped is not None and num_tokens > helped.shape.num_tokens:
            raise ValueError(f"expected at most {helped.shape.num_tokens} tokens, got {num_tokens}")
        self._check("hidden states", hidden, (num_tokens, self.hidden_size))
        self._check("pages", kv_layer, attention.kv_shape)
        self._check("workspace", workspace, (num_tokens * self.workspace_elements,))
        if (
            attention.num_tokens != num_tokens
            or attention.heads != heads
            or slots.head_dim != self.heads.head_dim
        ):
            raise ValueError(
                f"expected attention and places of {num_tokens} tokens for {heads}, "
                f"got {attention.num_tokens} for {attention.heads}, head_dim {slots.head_dim}"
            )

    def _check(self, what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        is_right = tensor.shape == shape and tensor.dtype is self.dtype
        if not is_right or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(
                f"expected {what} as contiguous {self.dtype} {list(shape)} on the CPU, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )


def run_layers(
    layers: Sequence[tuple[Layer, torch.Tensor, PagedAttention]],
    hidden: torch.Tensor,
    slots: Slots,
    workspace: torch.Tensor,
    helped: AttentionOwner | None = None,
    owner: Mailbox | None = None,
) -> torch.Tensor:
    """Return `hidden` [T, hidden_size] after several layers, computed in order.

    Keys and values are written, and errors are raised, as by `Layer.__call__`.

    Args:
        layers: Each layer with its pages and its attention. With `helped`, both lack the helper's part.
        hidden: The states that enter the first layer.
        slots: The token slots of the new tokens.
        workspace: Memory for intermediate results, as in `Layer.__call__`.
        helped: The exchange with a helper, if another process computes the attention of the last heads, or of
            the first pages of sequences. The pass must have been described to the helper
            (`AttentionOwner.begin`).
        owner: The mailbox of the owner, if this process is a helper that computes hosted layers. The owner is
            told when each layer is done.

    Raises HelperLost if the helper of `helped` is lost.
    """
    first, pages, attention = layers[0]
    first._check_pass(hidden, pages, attention, slots, workspace, helped)
    for layer, kv_layer, of_layer in layers[1:]:
        if layer._sizes != first._sizes or of_layer.num_tokens != attention.num_tokens:
            raise ValueError(
                f"expected layers and attention of one shape, got {layer._sizes}, {first._sizes}"
            )
        layer._check("pages", kv_layer, of_layer.kv_shape)
    structs = (_LayerOfPass * len(layers))(
        *(
            _LayerOfPass(layer._address, of_layer.address, kv_layer.data_ptr())
            for layer, kv_layer, of_layer in layers
        )
    )
    out = torch.empty_like(hidden)
    is_written = first._layers(
        ctypes.addressof(structs),
        len(layers),
        None if helped is None else helped.address,
        None if owner is None else owner.counters_address,
        slots.address,
        hidden.data_ptr(),
        out.data_ptr(),
        workspace.data_ptr(),
    )
    if not is_written and helped is not None:
        raise helped.lost()
    _check_written(is_written, pages, slots)
    return out


def _check_written(is_written: int, kv_layer: torch.Tensor, slots: Slots) -> None:
    if not is_written:
        raise ValueError(f"expected slots in pages {list(kv_layer.shape)}, got pages {slots.pages.tolist()}")

"""Weights of the layers that a worker owns: their memory, and how a checkpoint fills it, once.

Owns: tensors, Hugging Face names, shape checks, dummy values. Does not know: files, downloads, arithmetic.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from workers.engine.spec import ModelSpec

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")
# Old Llama checkpoints carry the rotary frequencies as a tensor; they are computed from the spec instead.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"
_DUMMY_STD = 0.02


class WeightsError(ValueError):
    """A checkpoint's tensors do not fit the model. Names the tensor, and what was expected."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are `[out, in]`; q, k, v are stacked, and so are gate and up."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Weights:
    """Memory for `layers`, the embedding on the first stage, final norm and head on the last.

    With tied embeddings, first and last stage hold the same matrix (twice, if they are different workers).
    """

    def __init__(self, spec: ModelSpec, layers: range, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self._slots: dict[str, torch.Tensor] = {}  # Hugging Face name -> the (part of a) tensor that it fills
        is_first, is_last = layers.start == 0, layers.stop == spec.num_layers
        self.layers = {layer: self._layer(layer) for layer in layers}
        self.embedding: torch.Tensor | None = None
        self.final_norm: torch.Tensor | None = None
        self.lm_head: torch.Tensor | None = None
        if is_first or (is_last and spec.tie_word_embeddings):
            self.embedding = self._new("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        if is_last:
            self.final_norm = self._new("model.norm.weight", spec.hidden_size)
            is_tied = spec.tie_word_embeddings
            self.lm_head = (
                self.embedding if is_tied else self._new("lm_head.weight", spec.vocab_size, spec.hidden_size)
            )

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies a checkpoint's tensors in, casting; those of other stages are skipped.

        Raises WeightsError for an unknown tensor, a wrong shape, or a tensor that never came.
        """
        missing = set(self._slots)
        for name, tensor in tensors:
            slot = self._slots.get(name)
            if slot is None:
                self._check_foreign(name)
                continue
            if slot.shape != tensor.shape:
                raise WeightsError(f"{name}: expected shape {list(slot.shape)}, got {list(tensor.shape)}")
            slot.copy_(tensor)
            missing.discard(name)
        if missing:
            shapes = ", ".join(f"{name} {list(self._slots[name].shape)}" for name in sorted(missing)[:5])
            raise WeightsError(
                f"{len(missing)} of {len(self._slots)} tensors are missing, among them: {shapes}"
            )
        self._slots.clear()  # whoever takes a layer now is its only owner

    def init_dummy(self, seed: int) -> None:
        """Small random weights. A tensor's values depend only on `seed` and its name, never on the stage."""
        for name, slot in self._slots.items():
            if name.endswith("norm.weight"):
                slot.fill_(1.0)
                continue
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            slot.copy_(torch.empty(slot.shape).normal_(0.0, _DUMMY_STD, generator=generator))
        self._slots.clear()

    def _check_foreign(self, name: str) -> None:
        """Passes what other stages load; refuses a tensor that no stage would."""
        layer = _LAYER_NAME.match(name)
        is_elsewhere = (
            layer is not None and int(layer[1]) < self.spec.num_layers and int(layer[1]) not in self.layers
        )
        is_end = name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        if not (is_elsewhere or is_end or name.endswith(_COMPUTED_SUFFIX)):
            raise WeightsError(f"{name}: a {self.spec.architecture} of this configuration has no such tensor")

    def _new(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._slots[name] = tensor
        return tensor

    def _stacked(self, names: list[str], num_rows: list[int], *row_shape: int) -> torch.Tensor:
        """One tensor whose consecutive rows are filled by several of the checkpoint's."""
        tensor = torch.empty((sum(num_rows), *row_shape), dtype=self.dtype, device=self.device)
        self._slots.update(zip(names, torch.split(tensor, num_rows), strict=True))
        return tensor

    def _layer(self, layer: int) -> LayerWeights:
        spec, prefix = self.spec, f"model.layers.{layer}"
        hidden, ffn = spec.hidden_size, spec.intermediate_size
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv, qkv_rows = [f"{prefix}.self_attn.{p}_proj" for p in "qkv"], [q_rows, kv_rows, kv_rows]
        gate_up, gate_up_rows = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], [ffn, ffn]
        o, down = f"{prefix}.self_attn.o_proj", f"{prefix}.mlp.down_proj"
        return LayerWeights(
            input_norm=self._new(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._stacked([f"{n}.weight" for n in qkv], qkv_rows, hidden),
            qkv_bias=self._stacked([f"{n}.bias" for n in qkv], qkv_rows) if spec.qkv_bias else None,
            q_norm=self._new(f"{prefix}.self_attn.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            k_norm=self._new(f"{prefix}.self_attn.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
            o=self._new(f"{o}.weight", hidden, q_rows),
            o_bias=self._new(f"{o}.bias", hidden) if spec.o_bias else None,
            post_norm=self._new(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._stacked([f"{n}.weight" for n in gate_up], gate_up_rows, hidden),
            gate_up_bias=self._stacked([f"{n}.bias" for n in gate_up], gate_up_rows)
            if spec.mlp_bias
            else None,
            down=self._new(f"{down}.weight", hidden, ffn),
            down_bias=self._new(f"{down}.bias", hidden) if spec.mlp_bias else None,
        )

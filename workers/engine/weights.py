"""The weights of a worker's layers: their memory, filled once from a checkpoint.

Owns: tensors, Hugging Face names, shape checks, a rank's part of each tensor, dummy values. Does not know:
files, downloads, arithmetic.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from workers.engine.spec import ModelSpec
from workers.engine.tensor_parallel import RankPart

_LAYER_NAME = re.compile(r"model\.(?:decoder\.)?layers\.(\d+)\.")
_NAME = re.compile(r"model\.(layers\.\d+\.)?(.+)\.(weight|bias)")
# Some checkpoints (Phi-3's) stack what others have as several tensors.
_PACKED_NAME = re.compile(r"(model\.layers\.\d+\.)(self_attn\.qkv_proj|mlp\.gate_up_proj)(\.weight|\.bias)")
_PACKED_PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# Old Llama checkpoints carry the rotary frequencies as a tensor; they are computed from the spec instead.
_COMPUTED_SUFFIX = ".rotary_emb.inv_freq"
_POSITIONS = "model.embed_positions.weight"
_FIRST_POSITION = 2
"""The row of the first position in OPT's checkpoints."""
_OPT_MODULES = {
    "input_layernorm": "self_attn_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "post_attention_layernorm": "final_layer_norm",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
    "norm": "final_layer_norm",
}
_DUMMY_STD = 0.02


def _opt_name(name: str) -> str:
    """Return what OPT's checkpoints call the tensor that Llama's checkpoints call `name`."""
    match = _NAME.fullmatch(name)
    if match is None:  # the head
        return name
    layer, module, kind = match[1] or "", match[2], match[3]
    return f"model.decoder.{layer}{_OPT_MODULES.get(module, module)}.{kind}"


class WeightsError(ValueError):
    """A checkpoint's tensors do not fit the model. The message names the tensor and the expected shape."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer.

    Matrices are `[out, in]`; q, k, v are stacked, and so are gate and up. A plain MLP has no gate.

    A rank of a group holds its own heads and MLP columns, and complete norms. One rank alone has the biases
    of `o` and `down`.
    """

    input_norm: torch.Tensor
    input_norm_bias: torch.Tensor | None
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    post_norm_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Cut:
    """A rank's range `part` of the `whole` rows or columns of a tensor."""

    whole: int
    part: range

    @classmethod
    def of_heads(cls, num_heads: int, heads: range, head_dim: int) -> "_Cut":
        return cls(num_heads * head_dim, range(heads.start * head_dim, heads.stop * head_dim))


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place for one tensor of a checkpoint, which has this `shape`.

    The tensor's slice `part` along dimension `dim` is copied to `target`. If `target` is None, the tensor
    belongs to another rank, and only its shape is checked.
    """

    shape: tuple[int, ...]
    target: torch.Tensor | None
    part: range
    dim: int

    def fill(self, tensor: torch.Tensor) -> None:
        if self.target is not None:
            self.target.copy_(tensor.narrow(self.dim, self.part.start, len(self.part)))


class Weights:
    """The weights of a rank's `part` of `layers`.

    The first stage has the embedding too, the last stage final norm and head.

    Every rank of the first stage has the whole learned positions.

    With tied embeddings, first and last stage hold the same matrix (twice, if they are different workers).
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        dtype: torch.dtype,
        device: torch.device,
        part: RankPart,
        *,
        has_ends: bool = True,
    ) -> None:
        """Allocate the weights; without `has_ends` only those of the layers, not embedding and head."""
        self.spec, self.dtype, self.device, self.part = spec, dtype, device, part
        self._slots: dict[str, _Slot] = {}  # by Hugging Face name
        is_first = has_ends and layers.start == 0
        is_last = has_ends and layers.stop == spec.num_layers
        self.layers = {layer: self._layer(layer) for layer in layers}
        self.embedding: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None
        """Learned positions, from the first position on."""
        self.final_norm: torch.Tensor | None = None
        self.final_norm_bias: torch.Tensor | None = None
        self.lm_head: torch.Tensor | None = None
        if is_first or (is_last and spec.tie_word_embeddings):
            self.embedding = self._vocab_rows("model.embed_tokens.weight")
        if is_first and spec.is_opt:
            num_rows = _FIRST_POSITION + spec.max_position
            rows = _Cut(num_rows, range(num_rows))
            self.positions = self._stacked([_POSITIONS], [rows], spec.hidden_size)[_FIRST_POSITION:]
        if is_last:
            self.final_norm, self.final_norm_bias = self._norm_of_hidden("model.norm")
            is_tied = spec.tie_word_embeddings
            self.lm_head = self.embedding if is_tied else self._vocab_rows("lm_head.weight")

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a checkpoint's tensors into the weights, cast to their dtype.

        Skips tensors of other stages, a tied head, and tensors that are computed here. Raises WeightsError
        for an unknown tensor, a wrong shape, or a missing tensor.
        """
        missing = set(self._slots)
        for name, tensor in self._unpacked(tensors):
            slot = self._slots.get(name)
            if slot is None:
                self._check_foreign(name)
                continue
            if slot.shape != tensor.shape:
                raise WeightsError(f"{name}: expected shape {list(slot.shape)}, got {list(tensor.shape)}")
            slot.fill(tensor)
            missing.discard(name)
        if missing:
            shapes = ", ".join(f"{name} {list(self._slots[name].shape)}" for name in sorted(missing)[:5])
            raise WeightsError(
                f"{len(missing)} of {len(self._slots)} tensors are missing, among them: {shapes}"
            )
        self._slots.clear()  # so that no reference keeps the memory of a layer that is taken out later

    def dummy_tensors(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield small random values for each tensor of a checkpoint, float32 on the weights' device.

        Values depend on `seed`, the tensor's name and the kind of device only, not on stage or rank. A GPU's
        values differ from a CPU's, and may differ from those of another kind of GPU.
        """
        for name, slot in self._slots.items():
            if name.endswith("norm.weight"):
                yield name, torch.ones(slot.shape, device=self.device)
                continue
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator(self.device)
            generator.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            values = torch.empty(slot.shape, device=self.device)
            yield name, values.normal_(0.0, _DUMMY_STD, generator=generator)

    def init_dummy(self, seed: int) -> None:
        """Load the values of `dummy_tensors`."""
        self.load(self.dummy_tensors(seed))

    def _check_foreign(self, name: str) -> None:
        """Check that a tensor that is not loaded here belongs to the model. Raises WeightsError."""
        layer = _LAYER_NAME.match(name)
        is_elsewhere = (
            layer is not None and int(layer[1]) < self.spec.num_layers and int(layer[1]) not in self.layers
        )
        ends = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
        ends += [_POSITIONS, "model.norm.bias"] if self.spec.is_opt else []
        is_end = name in map(self._named, ends)
        if not (is_elsewhere or is_end or name.endswith(_COMPUTED_SUFFIX)):
            raise WeightsError(f"{name}: a {self.spec.architecture} of this configuration has no such tensor")

    def _unpacked(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parts of stacked tensors as views, with the parts' names, and other tensors unchanged."""
        for saved_name, tensor in tensors:
            # Older OPT checkpoints were saved from the model without its head.
            name = f"model.{saved_name}" if saved_name.startswith("decoder.") else saved_name
            packed = _PACKED_NAME.fullmatch(name)
            names = [f"{packed[1]}{part}{packed[3]}" for part in _PACKED_PARTS[packed[2]]] if packed else []
            if not names or any(part not in self._slots for part in names):
                yield name, tensor
                continue
            num_rows = [self._slots[part].shape[0] for part in names]
            if tensor.shape[0] != sum(num_rows):
                raise WeightsError(f"{name}: expected {sum(num_rows)} rows, got {tensor.shape[0]}")
            yield from zip(names, torch.split(tensor, num_rows), strict=True)

    def _named(self, name: str) -> str:
        """Return what this model's checkpoints call the tensor that Llama's checkpoints call `name`."""
        return _opt_name(name) if self.spec.is_opt else name

    def _vocab_rows(self, name: str) -> torch.Tensor:
        return self._stacked([name], [_Cut(self.spec.vocab_size, self.part.vocab)], self.spec.hidden_size)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return self._stacked([name], [_Cut(size, range(size))])

    def _norm_of_hidden(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a norm's weight, and its bias if it has one."""
        size = self.spec.hidden_size
        bias = self._norm(f"{name}.bias", size) if self.spec.is_opt else None
        return self._norm(f"{name}.weight", size), bias

    def _stacked(self, names: list[str], cuts: list[_Cut], *row_shape: int) -> torch.Tensor:
        """Return a new tensor that `load` fills with the rank's parts of several tensors, stacked by rows."""
        num_rows = [len(cut.part) for cut in cuts]
        tensor = torch.empty((sum(num_rows), *row_shape), dtype=self.dtype, device=self.device)
        for name, cut, target in zip(names, cuts, torch.split(tensor, num_rows), strict=True):
            self._slots[self._named(name)] = _Slot((cut.whole, *row_shape), target, cut.part, dim=0)
        return tensor

    def _columns(self, name: str, num_rows: int, cut: _Cut) -> torch.Tensor:
        tensor = torch.empty((num_rows, len(cut.part)), dtype=self.dtype, device=self.device)
        self._slots[self._named(name)] = _Slot((num_rows, cut.whole), tensor, cut.part, dim=1)
        return tensor

    def _bias_of_sum(self, name: str, size: int) -> torch.Tensor | None:
        tensor = torch.empty(size, dtype=self.dtype, device=self.device) if self.part.adds_bias else None
        self._slots[self._named(name)] = _Slot((size,), tensor, range(size), dim=0)
        return tensor

    def _layer(self, layer: int) -> LayerWeights:
        spec, part, prefix = self.spec, self.part, f"model.layers.{layer}"
        hidden, head_dim = spec.hidden_size, spec.head_dim
        queries = _Cut.of_heads(spec.num_heads, part.heads, head_dim)
        keys = _Cut.of_heads(spec.num_kv_heads, part.kv_heads, head_dim)
        inner = _Cut(spec.intermediate_size, part.mlp_columns)
        qkv, qkv_cuts = [f"{prefix}.self_attn.{p}_proj" for p in "qkv"], [queries, keys, keys]
        gate_up = [f"{prefix}.mlp.up_proj"]
        if not spec.is_opt:
            gate_up.insert(0, f"{prefix}.mlp.gate_proj")
        gate_up_cuts = [inner for _ in gate_up]
        input_norm, input_norm_bias = self._norm_of_hidden(f"{prefix}.input_layernorm")
        post_norm, post_norm_bias = self._norm_of_hidden(f"{prefix}.post_attention_layernorm")
        o, down = f"{prefix}.self_attn.o_proj", f"{prefix}.mlp.down_proj"
        return LayerWeights(
            input_norm=input_norm,
            input_norm_bias=input_norm_bias,
            qkv=self._stacked([f"{n}.weight" for n in qkv], qkv_cuts, hidden),
            qkv_bias=self._stacked([f"{n}.bias" for n in qkv], qkv_cuts) if spec.qkv_bias else None,
            q_norm=self._norm(f"{prefix}.self_attn.q_norm.weight", head_dim) if spec.qk_norm else None,
            k_norm=self._norm(f"{prefix}.self_attn.k_norm.weight", head_dim) if spec.qk_norm else None,
            o=self._columns(f"{o}.weight", hidden, queries),
            o_bias=self._bias_of_sum(f"{o}.bias", hidden) if spec.o_bias else None,
            post_norm=post_norm,
            post_norm_bias=post_norm_bias,
            gate_up=self._stacked([f"{n}.weight" for n in gate_up], gate_up_cuts, hidden),
            gate_up_bias=self._stacked([f"{n}.bias" for n in gate_up], gate_up_cuts)
            if spec.mlp_bias
            else None,
            down=self._columns(f"{down}.weight", hidden, inner),
            down_bias=self._bias_of_sum(f"{down}.bias", hidden) if spec.mlp_bias else None,
        )

"""The facts of an engine's KVCache that the pool needs: model, layout, tokens of a page.

Owns: which keys of vLLM's configuration are used, and which settings are refused by name. Does not know:
pools, tensors.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake.errors import ConfigError, MismatchError
from mooncake.messages.blocks import DTYPE_BYTES, KVDtype, KVLayout
from mooncake.model.checkpoint import Checkpoint, kv_layout, open_checkpoint

_LAYER = re.compile(r"\.(\d+)\.")
_LAYOUT_FIELDS = ("dtype", "num_layers", "num_kv_heads", "head_dim", "first_layer", "first_head")


@dataclass(frozen=True, slots=True)
class EngineKV:
    """The KVCache of one engine. `layer_names` are vLLM's names, in the order of the layers."""

    checkpoint: Checkpoint
    layer_names: tuple[str, ...]
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    """Tokens of a page; vLLM calls pages blocks."""
    dtype: KVDtype

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> "EngineKV":
        """Return the KVCache of an engine with this configuration.

        Raises ConfigError for a KVCache that blocks of a pool cannot hold, ModelError for a model without
        identity, MismatchError if the checkpoint describes another KVCache than vLLM.
        """
        _refuse_splits(vllm_config.parallel_config)
        model = vllm_config.model_config
        _refuse_conversions(vllm_config)
        spec, layer_names = _one_group(kv_cache_config.kv_cache_groups)
        dtype = str(spec.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"KVCache of {dtype} has no place in a pool: it holds {', '.join(DTYPE_BYTES)}")
        engine = cls(
            checkpoint=_with_overrides(open_checkpoint(model.model), model.hf_overrides),
            layer_names=tuple(layer_names),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            page_tokens=spec.block_size,
            dtype=dtype,
        )
        expected = kv_layout(engine.checkpoint, spec.block_size, engine.dtype)
        check_layout(expected, engine.layout(spec.block_size), "the checkpoint says otherwise than vLLM")
        return engine

    def layout(self, block_size: int) -> KVLayout:
        """Return the layout of blocks of `block_size` tokens of this KVCache."""
        return KVLayout(len(self.layer_names), self.num_kv_heads, self.head_dim, block_size, self.dtype)

    def fingerprint(self, block_size: int) -> str:
        """Return the fingerprint of blocks of `block_size` tokens.

        A worker of ours with this model has the same fingerprint.
        """
        return self.checkpoint.fingerprint(self.dtype, block_size)

    def check_block_size(self, block_size: int) -> None:
        """Check that a block is a whole number of pages, or a page a whole number of blocks.

        Raises MismatchError.
        """
        if self.page_tokens % block_size and block_size % self.page_tokens:
            raise MismatchError(
                "block size",
                f"{self.page_tokens} tokens (vllm serve --block-size)",
                f"{block_size} tokens (the pool's)",
                "one must be a multiple of the other",
            )


def check_layout(ours: KVLayout, theirs: KVLayout, advice: str) -> None:
    """Check that two layouts differ at most in the block size.

    Raises MismatchError, which names the first other field in which the layouts differ.
    """
    for field in _LAYOUT_FIELDS:
        if getattr(ours, field) != getattr(theirs, field):
            raise MismatchError(f"KVCache {field}", getattr(ours, field), getattr(theirs, field), advice)


def _refuse_splits(parallel: Any) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ConfigError(
                f"{name} is {size}: each worker would hold a part of every block, and this connector stores"
                " whole ones; start vLLM without it"
            )


def _refuse_conversions(vllm_config: Any) -> None:
    """Refuse settings that change the KVCache and are not part of the fingerprint. Raises ConfigError."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.quantization is not None:
        raise ConfigError(
            f"quantization {model.quantization}: only unquantised checkpoints can be told apart"
        )
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError("load_format dummy: random weights have no identity; give a real checkpoint")
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise ConfigError(f"kv_cache_dtype {cache.cache_dtype} has no place in a pool; leave it at auto")
    if model.revision is not None and not Path(model.model).is_dir():
        raise ConfigError(f"revision {model.revision}: give the directory of that revision as the model")


def _one_group(groups: Sequence[Any]) -> tuple[Any, list[str]]:
    """Return the spec and layer names of the only KVCache group.

    Raises ConfigError if there are several groups, or if the group is not one of full attention.
    """
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if kinds != ["FullAttentionSpec"]:
        raise ConfigError(
            f"KVCache of kind {', '.join(kinds) or 'none'}: blocks of a pool hold full attention only"
        )
    names = list(groups[0].layer_names)
    numbers = [int(found[1]) if (found := _LAYER.search(name)) else -1 for name in names]
    if sorted(numbers) != list(range(len(names))):
        raise ConfigError(f"layers {', '.join(sorted(names)[:3])}, ... cannot be put in order")
    return groups[0].kv_cache_spec, [name for _, name in sorted(zip(numbers, names, strict=True))]


def _with_overrides(checkpoint: Checkpoint, overrides: object) -> Checkpoint:
    """Return the checkpoint with vLLM's overrides of its configuration, which change its fingerprint.

    Raises ConfigError for overrides that are no dict.
    """
    if not overrides:
        return checkpoint
    if not isinstance(overrides, dict):
        raise ConfigError("hf_overrides is no list of keys and values; blocks could be another model's")
    return dataclasses.replace(checkpoint, config={**checkpoint.config, **overrides})

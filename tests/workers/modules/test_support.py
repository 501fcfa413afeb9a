"""Models and dtypes without support for modules at helpers: the refusal of an order names what has none."""

from collections.abc import Callable

import msgspec
import pytest
import torch

from conductor.policy import Conductor
from conductor.settings import Limits
from mooncake.bus.zeromq import peer_identity
from mooncake.messages.fronts import FrontHello
from mooncake.messages.migration import ModulesPart, ModulesSupport
from mooncake.messages.operators import MoveModules, Ordered
from mooncake.messages.workers import PROTOCOL_VERSION, Role
from tests.conductor.small_cluster import FRONT, registration
from tests.tiny_models import tiny_model
from tests.workers.engine.ranks import ThreadGroup
from tests.workers.modules_lab import wide_model
from workers.engine.model import DecoderModel
from workers.engine.tensor_parallel import TensorShard
from workers.execution.model_spec import model_spec

ONLY = "only the CPU's own kernels compute with a helper, and torch computes"


def wide(
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_layers: int = 3,
    shard: TensorShard | None = None,
) -> DecoderModel:
    spec = model_spec(wide_model().config.to_dict())
    return DecoderModel(spec, range(num_layers), dtype, device, shard=shard)


def opt() -> DecoderModel:
    spec = model_spec(tiny_model("opt").config.to_dict())
    return DecoderModel(spec, range(spec.num_layers), torch.float32)


def refusal(model: DecoderModel) -> str:
    """Return why the Conductor refuses to move a KV head of an instance that has this model."""
    conductor = Conductor(1, "model", Limits())
    conductor.handle(FRONT, FrontHello(PROTOCOL_VERSION, "model"), 0.0)
    for name in ("d0", "d1"):
        support = ModulesSupport(f"/run/{name}", model.why_not_helped)
        register = msgspec.structs.replace(registration(name, Role.DECODE), modules=support)
        conductor.handle(peer_identity(name, 1), register, 0.0)
    [effect] = conductor.handle(FRONT, MoveModules(1, "d0", "d1", ModulesPart(1)), 1.0)
    assert isinstance(effect.message, Ordered)
    return effect.message.refusal


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: wide(torch.float16),
            f"{ONLY} this model: torch.float16 is not one of torch.bfloat16, torch.float32",
        ),
        (
            opt,
            f"{ONLY} this model: the project's kernels have no LayerNorms, learned positions and plain MLPs,"
            " which OPTForCausalLM needs",
        ),
        (lambda: wide(device="cuda", dtype=torch.float64), f"{ONLY} on cuda"),
        (
            lambda: wide(shard=ThreadGroup(2).shards[1]),
            "its heads are divided among the 2 ranks of a tensor-parallel group",
        ),
        (lambda: wide(num_layers=2), "its layers are divided among stages"),
    ],
    ids=["float16", "opt", "cuda", "tensor parallel", "pipeline"],
)
def test_a_refused_order_names_what_has_no_support(make: Callable[[], DecoderModel], reason: str) -> None:
    assert refusal(make()) == f"KV heads neither leave nor come to d0: {reason}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_of_the_cpus_own_kernels_have_support(dtype: torch.dtype) -> None:
    assert wide(dtype).why_not_helped == ""

"""The vLLM connector `MooncakeServeConnector`, which passes vLLM's hooks to its two sides.

vLLM makes one object in the scheduler's process and one object in the worker's process. Both may be the same
process. The scheduler's side makes a plan for each step, which reaches the worker's side as the step's
metadata.

Owns: the mapping of hooks to the two sides. Does not know: how they work. Loads torch and vLLM.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvstore.connectors.vllm import generators
from kvstore.connectors.vllm.adapters import Adapters
from kvstore.connectors.vllm.engine_kv import EngineKV
from kvstore.connectors.vllm.link import PoolLink
from kvstore.connectors.vllm.plans import StepPlan
from kvstore.connectors.vllm.scheduler_side import SchedulerSide
from kvstore.connectors.vllm.settings import ConnectorSettings
from kvstore.connectors.vllm.worker.page_order import page_order
from kvstore.connectors.vllm.worker.worker_side import Memory, WorkerSide
from mooncake.errors import ConfigError

log = logging.getLogger(__name__)


class StepMetadata(KVConnectorMetadata):
    """The plan of a step in the form that vLLM passes to the worker."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class MooncakeServeConnector(KVConnectorBase_V1):
    """vLLM's connector to pools of mooncake-serve (docs/vllm.md)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
        engine = EngineKV.of(vllm_config, kv_cache_config)
        schedules = role is KVConnectorRole.SCHEDULER
        if schedules and transfer.kv_load_failure_policy != "recompute":
            log.warning(
                "kv_load_failure_policy is %s: requests whose load fails will fail; set it to recompute",
                transfer.kv_load_failure_policy,
            )
        link = PoolLink(settings, engine, speaks=schedules)
        self._layers = {name: number for number, name in enumerate(engine.layer_names)}
        self._attention = vllm_config.compilation_config.static_forward_context
        self._link = link
        # Only one of the two is used, according to the role.
        self._scheduler = SchedulerSide(
            link,
            engine.page_tokens,
            adapter_of=Adapters().digest,
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
        )
        self._worker = WorkerSide(link)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not stored is computed

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False  # no layer of a step is loaded or stored by itself

    def shutdown(self) -> None:
        self._worker.close()
        self._scheduler.close()
        self._link.close()

    # -- the scheduler's side ---------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._scheduler.num_new_matched(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
        pages = self._kv_cache_manager.get_block_ids
        preempted = scheduler_output.preempted_req_ids or set()
        return StepMetadata(
            self._scheduler.plan(scheduled, lambda request_id: pages(request_id)[0], preempted)
        )

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.loaded(connector_output.finished_recving or (), connector_output.invalid_block_ids)
        self._scheduler.stored(connector_output.finished_sending or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self._scheduler.finished(request.request_id, len(block_ids)), None

    def has_pending_block_frees(self) -> bool:
        """Return whether finished requests keep pages.

        vLLM asks before it preempts a request. If there are such pages, the next step frees them instead.
        """
        return self._scheduler.demand_pages()

    # -- the worker's side ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        tensors = [kv_caches[name] for name in self._layers]
        order = page_order(self._attention[next(iter(self._layers))], tensors[0])
        generators.install()
        self._worker.register(_memory(tensors), order)

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        self._worker.preempt(kv_connector_metadata.plan.preempted)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Not in `start_load_kv`, which follows the step's forward pass if nothing in it waits for a load.
        self._worker.begin_step(connector_metadata.plan)
        generators.begin_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing, as loads have begun already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, as requests are computed only when all of their KVCache is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing, as blocks are stored when all of their layers are computed."""

    def wait_for_save(self) -> None:
        self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return self._worker.take_stored(), self._worker.take_loaded()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_missing_pages()


def _memory(tensors: list[torch.Tensor]) -> Memory:
    """Return the addresses of the pages of all layers. Raises ConfigError for pages that cannot be copied."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ConfigError(f"KVCache on {tensor.device}: this connector copies pages of the CPU only")
        if tensor.shape != first.shape or tensor.stride() != first.stride() or not tensor[0].is_contiguous():
            raise ConfigError("pages of layers differ in their layout, or are not in one piece")
    return Memory(
        [tensor.data_ptr() for tensor in tensors],
        page_stride=first.stride(0) * first.element_size(),
        num_pages=first.shape[0],
        keeps=tensors,
    )

"""The simulated counterpart of a real server on this machine.

Owns: the model and the machine as cards, the shape of the instances. Does not know: loads, measurements.
"""

from benchmarks.tools.simulator.calibration.costs import Calibration
from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.cluster.machines.cards import STATED, HardwareCard, ModelCard
from benchmarks.tools.simulator.cluster.shape import InstanceShape
from benchmarks.tools.simulator.real_server import RealServer
from conductor.settings import Limits, PolicySettings

MODEL = ModelCard("smollm2-135m", 30, 576, 9, 3, 1536, 49152)
GIB = 1 << 30
BLOCK_TOKENS, PREFILL_CHUNK, SATURATING_TOKENS, MAX_BATCH = 32, 512, 128, 32
COPY_BYTES_PER_S = 5e9
"""The bytes a second that a core copies in memory, to the device's pages or to another process."""


def simulated_server(server: RealServer, machine: Calibration, limits: Limits) -> DisaggregatedCluster:
    """Return a cluster with the instances of `server` and the costs of `machine`."""
    hardware = HardwareCard(
        name="this machine",
        num_gpus=1,
        gpu_flops=1.0,
        gpu_memory_bytes_per_s=1.0,
        gpu_memory_bytes=(GIB + MODEL.weights_bytes) / STATED.device_memory,
        nic_bytes_per_s=COPY_BYTES_PER_S / STATED.nic,
        pcie_bytes_per_s=COPY_BYTES_PER_S / STATED.pcie,
        pool_bytes=GIB,
    )
    shape = InstanceShape(
        MODEL,
        hardware,
        machine.costs,
        prefill_chunk=PREFILL_CHUNK,
        max_batch=MAX_BATCH,
        block_tokens=BLOCK_TOKENS,
        saturating_tokens=SATURATING_TOKENS,
        first_token_s=machine.first_token_s,
        prompt_s=machine.prompt_s,
        slowdowns=machine.slowdowns,
        join_costs=machine.join_costs,
        jitter=machine.jitter,
    )
    return DisaggregatedCluster(
        shape,
        server.num_prefill,
        server.num_decode,
        limits,
        PolicySettings(),
        max_tokens=1,
        num_both=server.num_both,
    )

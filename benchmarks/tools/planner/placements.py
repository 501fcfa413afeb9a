"""The clusters that a number of devices can form.

All instances of a cluster are tensor-parallel groups of one size, within a node. A coupled instance prefills
and decodes; it computes prompts whole, or in chunks.

Owns: the possible clusters, and which of them are neighbours. Does not know: which are good.
"""

import math
from collections.abc import Sequence

import msgspec

from benchmarks.tools.simulator.cluster.machines.cards import hardware_card
from benchmarks.tools.simulator.cluster.machines.costs import PromptShare
from benchmarks.tools.simulator.setup import Setup
from benchmarks.tools.traces.request import num_blocks_of
from mooncake.errors import ConfigError

CHUNKS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of tokens of an iteration for coupled instances that compute prompts in chunks."""


def group_sizes(base: Setup, num_devices: int, longest_tokens: int) -> list[int]:
    """Return the possible numbers of devices of an instance.

    If `base` has a number, only this number is tried; otherwise all powers of 2 up to the devices of a node
    are tried. The model and a request of `longest_tokens` tokens must fit. Raises ConfigError if no number is
    possible, with the reason for the largest one.
    """
    of_node = hardware_card(base.hardware).num_gpus
    sizes = [base.num_gpus] if base.num_gpus else [1 << n for n in range(of_node.bit_length())]
    possible, refusal = [], ConfigError(f"{num_devices} devices are less than one instance needs")
    for size in sizes:
        if size > min(num_devices, of_node):
            continue
        try:
            _check(msgspec.structs.replace(base, num_gpus=size, num_coupled=1), longest_tokens)
            possible.append(size)
        except ConfigError as error:
            refusal = error
    if not possible:
        raise refusal
    return possible


def _check(setup: Setup, longest_tokens: int) -> None:
    shape = setup.shape()
    if (needed := num_blocks_of(longest_tokens)) > shape.num_device_blocks:
        raise ConfigError(
            f"the longest request needs {needed:,} blocks of KVCache, an instance of {setup.num_gpus}"
            f" {setup.hardware} has room for {shape.num_device_blocks:,}; use more devices, or larger ones"
        )


def disaggregated(base: Setup, group_size: int, num_prefill: int, num_decode: int) -> Setup:
    """Return an xPyD cluster."""
    return msgspec.structs.replace(
        base, num_gpus=group_size, num_prefill=num_prefill, num_decode=num_decode, num_coupled=0
    )


def coupled(base: Setup, group_size: int, num_instances: int) -> Setup:
    """Return a cluster of coupled instances that compute whole prompts."""
    return msgspec.structs.replace(
        base, num_gpus=group_size, num_prefill=0, num_decode=0, num_coupled=num_instances, chunk_tokens=None
    )


def chunked(whole: Setup) -> list[Setup]:
    """Return coupled clusters like `whole` with each possible chunk size, ascending.

    The computation of a chunk alone must take no longer than the TBT SLO.
    """
    costs = whole.shape().costs
    slo_s = math.inf if whole.tbt_slo_s is None else whole.tbt_slo_s
    return [
        msgspec.structs.replace(whole, chunk_tokens=chunk_tokens)
        for chunk_tokens in CHUNKS
        if costs.iteration_s([PromptShare(chunk_tokens, 0)], 0) <= slo_s
    ]


def neighbours(setup: Setup) -> list[Setup]:
    """Return the clusters in which one instance has the other role; an empty list for a coupled cluster."""
    p, d = setup.num_prefill, setup.num_decode
    moved = [(p - 1, d + 1), (p + 1, d - 1)] if not setup.num_coupled else []
    return [
        disaggregated(setup, setup.num_gpus or 0, num_prefill, num_decode)
        for num_prefill, num_decode in moved
        if num_prefill and num_decode
    ]


def one_more(setup: Setup) -> Sequence[Setup]:
    """Return the clusters with one more instance of the same size."""
    if setup.num_coupled:
        return [msgspec.structs.replace(setup, num_coupled=setup.num_coupled + 1)]
    p, d, size = setup.num_prefill, setup.num_decode, setup.num_gpus or 0
    return [disaggregated(setup, size, p + 1, d), disaggregated(setup, size, p, d + 1)]


def num_devices_of(setup: Setup) -> int:
    """Return the number of devices of all instances."""
    return (setup.num_prefill + setup.num_decode + setup.num_coupled) * (setup.num_gpus or 0)


def label(setup: Setup) -> str:
    """Return a cluster's name for people: its instances, and the devices of one."""
    devices = "device" if setup.num_gpus == 1 else "devices"
    return f"{setup.name}, {setup.num_gpus} {devices} each"

"""The load over time, as it is drawn in Figures 9 and 10 of the Mooncake paper.

Owns: samples, one for each second. Does not know: the causes of the load.
"""

from array import array
from typing import Any

import numpy as np

from benchmarks.tools.simulator.cluster.cluster import DisaggregatedCluster
from benchmarks.tools.simulator.summary import SLOs

COLUMNS = ("time_s", "prefill_load", "decode_load", "num_queued", "num_decoding")


class LoadSeries:
    """A recorder of a cluster's load, for the cluster's `on_second` callback.

    Prefill load is the mean length of the prefill instances' queues in seconds, divided by the TTFT SLO.
    Decode load is the mean time of an iteration of the decode instances, divided by the TBT SLO (section
    7.1).
    """

    def __init__(self, slos: SLOs) -> None:
        self._ttft_slo_s, self._tbt_slo_s = slos.ttft_s or 1.0, slos.tbt_s or 1.0
        self._columns = {name: array("d") for name in COLUMNS}

    def __call__(self, cluster: DisaggregatedCluster) -> None:
        queued_s = [instance.queued_s for instance in cluster.prefills]
        iteration_s = [instance.iteration_s for instance in cluster.decodes]
        sample = (
            cluster.clock.now_s,
            sum(queued_s) / max(1, len(queued_s)) / self._ttft_slo_s,
            sum(iteration_s) / max(1, len(iteration_s)) / self._tbt_slo_s,
            sum(instance.num_queued for instance in cluster.prefills),
            sum(instance.batch.size for instance in cluster.decodes),
        )
        for column, value in zip(self._columns.values(), sample, strict=True):
            column.append(value)

    def __getitem__(self, name: str) -> "np.ndarray[Any, Any]":
        return np.array(self._columns[name])

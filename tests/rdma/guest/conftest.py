"""Collection of tests that need RDMA devices, only in the machine of `tests/rdma/vm`."""

import os

if "MOONCAKE_RDMA_VM" not in os.environ:
    collect_ignore_glob = ["*"]

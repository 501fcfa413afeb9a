"""The health check of a container: it exits with 0 if the container's process serves.

It asks the process for `/ready`. A Conductor in a container of its own is asked for `/health` instead: it is
ready only when its instances have registered, and these wait until it is healthy.
"""

import os
import sys
import urllib.error
import urllib.request

is_instance = os.environ.get("MOONCAKE_ROLE") in ("prefill", "decode", "both")
path = "ready"
if is_instance:
    port = os.environ["MOONCAKE_WORKER_METRICS_LISTEN"].rpartition(":")[2]
else:
    port = os.environ.get("MOONCAKE_HTTP_PORT", "8000")
    if os.environ.get("MOONCAKE_ROLE") == "conductor":
        path = "health"  # it is ready when there are instances, which wait for it to be healthy
try:
    urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=4).close()
except (urllib.error.URLError, OSError) as error:
    sys.exit(f"not ready: {error}")

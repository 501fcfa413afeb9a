"""The health check of a container, which exits with 0 if the container's process serves, and else with 1.

The check asks the process for `/ready`. A Conductor in a container of its own is asked for `/health`
instead: the Conductor is ready only when its instances have registered, and the instances wait until the
Conductor is healthy.
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
        path = "health"  # the Conductor is ready when instances have registered, and they wait for its health
try:
    urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=4).close()
except (urllib.error.URLError, OSError) as error:
    sys.exit(f"not ready: {error}")

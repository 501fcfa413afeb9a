"""A hook that waits until a front has no request left, before its container is stopped.

Its arguments are the address of the front's metrics; seconds for which requests are still accepted, while
load balancers learn that the front will end; and the most seconds to wait afterwards.
"""

import http.client
import ssl
import sys
import time
import urllib.request

PERIOD_S = 1.0
REQUESTS = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")


def num_requests(url: str) -> float:
    """Return the number of requests at the front.

    The certificate of `url` is not verified, because it does not name the loopback address.
    """
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    with urllib.request.urlopen(url, timeout=4, context=context) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(REQUESTS))


def main(url: str, leave_s: float, finish_s: float) -> None:
    time.sleep(leave_s)
    end_s = time.monotonic() + finish_s
    while time.monotonic() < end_s:
        try:
            number = num_requests(url)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(getattr(error, "reason", error), ConnectionRefusedError):
                sys.exit(f"the front is gone: {error}")
            print(f"not known how many requests are left: {error!r}", flush=True)  # it may be busy with them
        else:
            if not number:
                return
            print(f"requests left: {number:g}", flush=True)
        time.sleep(PERIOD_S)


main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))

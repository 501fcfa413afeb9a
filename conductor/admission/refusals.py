"""How much longer decode instances say that a token takes than the Conductor had predicted.

They check again when prefill has ended (Mooncake, section 3), and what they refuse then was computed in vain.
Where there is too much to do, every batch is as large as it may be: if they predict one hundredth more than
the Conductor, it lets in, one after the other, what they all refuse. So what they predict counts before they
refuse anything.

Owns: the latest difference. Does not know: what is predicted, who is refused.
"""

import math

HALF_LIFE_S = 20.0
"""of a difference: nobody tells when it is over"""
MOST = 1.2
NEAR = 0.3
"""of the TBT SLO: how wrong a smaller batch is predicted says little of one at the limit. Not closer, for
batches grow by a good part between two heartbeats: from 0.5 on fewer requests are served in time"""


class Refusals:
    """Of all decode instances together."""

    def __init__(self) -> None:
        self._excess = 0.0
        self._at_s = -math.inf

    def note(self, predicted_s: float, says_s: float, now_s: float) -> None:
        """An instance says that a token would take `says_s`, the Conductor had predicted `predicted_s`."""
        self._excess = max(self.factor(now_s), min(says_s / predicted_s, MOST)) - 1.0
        self._at_s = now_s

    def factor(self, now_s: float) -> float:
        """Of a predicted TBT, at least 1."""
        return 1.0 + self._excess * math.exp2((self._at_s - now_s) / HALF_LIFE_S)

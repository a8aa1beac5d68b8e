"""When requests of an open loop are sent: at random times of a given rate, which do not wait for answers."""

from __future__ import annotations

import numpy as np


def arrival_times(count: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds after the begin at which each of some requests is sent; the first at 0.

    Times between two requests have a gamma distribution with mean 1 / rate: of a Poisson process where `burstiness` is
    1, more in bursts below that, more even above.

    Args:
        count: Requests.
        rate: Requests a second, above 0; infinite to send all at once.
        burstiness: Shape of the gamma distribution, above 0.
        seed: The same seed gives the same times.
    """
    gaps = np.random.default_rng(seed).gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=count)
    gaps[:1] = 0.0
    return [float(time) for time in gaps.cumsum()]

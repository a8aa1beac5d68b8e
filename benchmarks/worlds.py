"""The made worlds in which controllers are played, see `simulator`."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.simulator import Curve, SimulatedDrafter, World

FLAT: Curve = (1, 8, 16, 64, 128), (1.0, 1.05, 1.15, 1.9, 3.0)
SLOPED: Curve = (1, 64, 128), (1.0, 1.0 + 63 * 0.12, 1.0 + 127 * 0.12)
STEEP: Curve = (1, 64, 128), (1.0, 1.0 + 63 * 0.3, 1.0 + 127 * 0.3)
STAIRS: Curve = (1, 4, 5, 8, 9, 16, 17, 32, 64, 128), (1.0, 1.0, 1.3, 1.3, 1.7, 1.8, 2.5, 2.8, 5.0, 10.0)

_MODEL = SimulatedDrafter(rates=(0.8,))
_HEAD = SimulatedDrafter(rates=(0.7, 0.2), stretch=100, level_s=0.2, fades=0.9)
WORLDS: Sequence[World] = (
    World(name="good, flat", drafters=[_MODEL], curve=FLAT),
    World(name="good, steep", drafters=[_MODEL], curve=STEEP),
    World(name="poor", drafters=[replace(_MODEL, rates=(0.45,))], curve=SLOPED),
    World(name="useless", drafters=[replace(_MODEL, rates=(0.05,))], curve=SLOPED),
    World(name="text turns good", drafters=[replace(_MODEL, rates=(0.05, 0.9), stretch=1500)], curve=SLOPED),
    World(name="text that changes", drafters=[replace(_MODEL, rates=(0.9, 0.05), level_s=0.15)], curve=SLOPED),
    World(name="head, every second text", drafters=[_HEAD], curve=SLOPED, answer=100),
    World(
        name="head, every fourth text", drafters=[replace(_HEAD, rates=(0.7, 0.2, 0.2, 0.2))], curve=SLOPED, answer=100
    ),
    World(name="head, no text", drafters=[replace(_HEAD, rates=(0.2,))], curve=SLOPED, answer=100),
    World(name="told too flat", drafters=[_MODEL], curve=STEEP, told=FLAT),
    World(name="told too steep", drafters=[_MODEL], curve=FLAT, told=STEEP),
    World(name="dear drafter", drafters=[replace(_MODEL, level_s=0.5)], curve=FLAT),
    World(name="draft told cheap", drafters=[replace(_MODEL, level_s=0.5, told=0.1)], curve=FLAT),
    World(name="noisy clock", drafters=[_MODEL], curve=SLOPED, noise=0.2, slow=0.05),
    World(name="busy by turns", drafters=[replace(_MODEL, level_s=0.1)], curve=SLOPED, busy=60),
    World(name="batches change", drafters=[_MODEL], curve=STAIRS, batches=(1, 4, 16, 2, 8)),
    World(name="requests in bursts", drafters=[_MODEL], curve=STAIRS, arrivals=4.0),
    World(name="lookup", drafters=[SimulatedDrafter(rates=(0.85,), hits=0.4, level_s=0.0, fixed_s=0.01)], curve=SLOPED),
    World(
        name="scored tree", curve=SLOPED,
        drafters=[SimulatedDrafter(rates=(0.7,), level_s=0.08, siblings=3, spread=1.5, deepest=6)],
    ),
    World(
        name="lookup and model", curve=SLOPED,
        drafters=[
            SimulatedDrafter(rates=(0.9,), hits=0.4, level_s=0.0, fixed_s=0.01, spread=1.0),
            replace(_MODEL, level_s=0.12, spread=1.0),
        ],
    ),
    World(
        name="sure model", curve=FLAT, drafters=[replace(_MODEL, rates=(0.97,), fades=1.0, level_s=0.06, deepest=10)]
    ),
    World(
        name="sure model, no scores", curve=FLAT,
        drafters=[
            SimulatedDrafter(rates=(0.9,), hits=0.4, level_s=0.0, fixed_s=0.01),
            SimulatedDrafter(rates=(0.95,), fades=1.0, level_s=0.06, deepest=16),
        ],
    ),
)  # fmt: skip

"""Plays controllers against made worlds, beside every fixed depth.

    python -m benchmarks.control [--seeds 30] [--length 3000] [--only NAME] [--control smartspec]

`share` is the speed divided by that of the best fixed setting: the median of all seeds, and the least. `early` is the
same for the first 64 tokens. `least` is the least speed beside plain decoding, over all iterations up to any after the
200th, of all seeds.
"""

import argparse
import sys
from functools import partial
from statistics import median

from benchmarks.simulator import compare, controller_of
from benchmarks.worlds import WORLDS


def main(arguments: list[str]) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--length", type=int, default=3000, help="tokens of each sequence")
    parser.add_argument("--only", help="part of a world's name")
    parser.add_argument("--control", choices=("goodput", "heuristic", "smartspec"), default="goodput")
    options = parser.parse_args(arguments)
    print("| world | best fixed depths | best gain | gain | share, median | share, least | early | least | drafts |")
    print("|---|---|---|---|---|---|---|---|---|")
    for world in WORLDS:
        if options.only and options.only not in world.name:
            continue
        policy = partial(controller_of, control=options.control)
        found = [compare(world, policy, seed, options.length) for seed in range(options.seeds)]
        depths = ", ".join(map(str, found[0].setting.values())) or "none"
        shares, early = [each.share for each in found], [each.early for each in found]
        gains = f"{median(each.best for each in found):.2f} | {median(each.gain for each in found):.2f}"
        least, asked = min(each.least_share for each in found), median(each.played.asked for each in found)
        print(
            f"| {world.name} | {depths} | {gains} | {median(shares):.3f} | {min(shares):.3f} | {median(early):.2f} "
            f"| {least:.3f} | {asked:.2f} |",
            flush=True,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

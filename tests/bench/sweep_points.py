"""Made-up results of sweeps, whose figures are known."""

from typing import Any

from foretoken.bench.grid import Point, Serving
from foretoken.bench.sweep import PointResult, Quartiles
from foretoken.entrypoints.config import Setup


def made_up(method: str, nodes: float, tau: float, speed: float = 10.0, **more: Any) -> PointResult:
    """A point of a serving; more: what else its attributes are."""
    changes = more.pop("changes", {"max_nodes": int(nodes) + 1})
    name = " ".join([method, *(f"{key}={value}" for key, value in changes.items())])
    values: dict[str, Any] = {
        "name": name, "method": method, "changes": changes, "serving": Serving(),
        "speculative_config": {"method": method, **changes}, "runner": "lean-native", "runner_choice": "it fits",
        "num_rounds": 2, "tokens_per_s": Quartiles(speed, speed - 1, speed + 1),
        "plain_tokens_per_s": Quartiles(8.0, 7.5, 8.5), "speed_up": Quartiles(speed / 8, 1.0, 2.0), "tau": tau,
        "tau_by_round": Quartiles(tau, tau, tau), "nodes": nodes, "tree_utilisation": 0.5,
        "acceptance_by_depth": [0.5, 0.25], "declined": 0.0, "efficiency": 0.4,
        "shares": {"draft": 0.25, "verify": 0.5, "host": 0.25}, "num_identical": 2, "num_texts": 2,
        "nats_per_token": None, "draft_errors": 0,
    }  # fmt: skip
    return PointResult(**{**values, **more})


def point_of(result: PointResult) -> Point:
    """The point that a result is of."""
    return Point(
        serving=result.serving, setup=Setup(result.name, result.speculative_config), method=result.method,
        changes=result.changes,
    )  # fmt: skip


def many() -> list[PointResult]:
    """Two methods, one of them with two thresholds and two depths, at two batch sizes; some texts need escapes."""
    results = []
    for batch_size in (1, 4):
        serving = Serving(batch_size=batch_size)
        for nodes in (4, 16, 64):
            results.append(made_up("ngram:a<b&c", nodes / 2, 1.5, 9.0, serving=serving))
            for threshold in (0, 0.05):
                for depth in (2, 4):
                    changes = {
                        "num_speculative_tokens": depth, "pruning.path_probability": threshold, "max_nodes": nodes
                    }  # fmt: skip
                    results.append(
                        made_up("medusa", nodes * (1 - 8 * threshold), nodes**0.2 + depth / 8, 100 / nodes**0.5,
                                serving=serving, changes=changes)
                    )  # fmt: skip
    return results

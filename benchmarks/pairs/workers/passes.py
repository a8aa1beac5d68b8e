"""Single passes of foretoken over a GGUF file behind some cached rows."""

import statistics
import time

from protocol import serve, settings

from foretoken.core.backend import set_num_threads
from foretoken.core.passes import Pass
from foretoken.models.loading import load_model
from foretoken.runner.runner import Runner

_given = settings()
set_num_threads(2)
_model = load_model(_given["target"], dtype="bfloat16", rounds_inputs=_given["bits"] == 8)
_runner = Runner(_model, num_slots=1, context_len=_given["rows"] + 1100, max_nodes=1000, runner="lean-native")
for _part in (*_runner.cache.keys, *_runner.cache.values):
    _part[..., : _given["rows"] + 8, :].normal_()


def answer(rows: int, tokens: int, count: int) -> dict[str, float]:
    """Median seconds of some passes."""
    work = Pass.of_chains([[(37 * i + 5) % 5000 for i in range(tokens)]], slots=range(1), prefix_lens=[rows])
    work = work.with_all_logits() if tokens <= 64 else work
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        _runner.run(work)
        taken.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(taken)}


serve(answer)

"""The process of one section's share: imports, waits for its turn, works, and writes rows as JSON lines.

A section has processes of its own because a kernel that reads what it must not ends everything in its process.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu_suite.interpreter import mend_interpreter
from benchmarks.gpu_suite.work import Deadline, Work, section_module

_LAST_LINES = 12  # of a traceback


def main() -> int:
    """Works when told to; what is printed goes to standard error, rows to what was standard output."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("module")
    parser.add_argument("--shard", type=int, required=True)
    parser.add_argument("--num-shards", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as rows:
        os.dup2(2, 1)

        def send(message: Mapping[str, Any]) -> None:
            rows.write(json.dumps(message) + "\n")
            rows.flush()

        def emit(table: str, row: Mapping[str, Any]) -> None:
            send({"table": table, "row": {**row, **({"rehearsal": True} if options.rehearse else {})}})

        try:
            if options.rehearse:
                mend_interpreter()
                torch.set_num_threads(1)
            module = section_module(options.module)
            turn = sys.stdin.readline()
            if not turn:  # the parent is gone
                return 0
            work = Work(
                device=torch.device("cpu" if options.rehearse else "cuda"),
                is_rehearsal=options.rehearse,
                seed=options.seed,
                shard=options.shard,
                num_shards=options.num_shards,
                deadline=Deadline(json.loads(turn)["seconds"]),
                emit=emit,
            )
            module.run(work)
        except Exception as err:  # noqa: BLE001 - whatever stops a section must not stop the others
            traceback.print_exc()
            lines = traceback.format_exception(err)
            send({"error": "".join(lines).splitlines()[-_LAST_LINES:]})
            return 1
        send({"done": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Prompts of benchmark sets, in tokens, by category."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from foretoken.bench.speed_report import NO_CATEGORY
from foretoken.bench.workload import prompt_token_ids, read_prompts

# Spec-Bench names the eight kinds of MT-bench's questions, and counts them as one category.
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_ANY_LENGTH = 1 << 20  # tokens
GROUPS = dict.fromkeys(_MT_BENCH, "mt-bench")
MOST_EDIT_BYTES = 12_000  # of the file of an edit task, so that prompt and answer fit


def in_tokens(
    files: Iterable[str], tokenizer: Any, *, limit: int, groups: dict[str, str] | None = None
) -> dict[str, list[list[int]]]:
    """Returns token ids by category, without rows of more than `limit`; rows without one have their file's name."""
    found: dict[str, list[list[int]]] = defaultdict(list)
    for file in files:
        for row in read_prompts(str(file), groups=groups or {}):
            ids = row.token_ids(tokenizer, len(tokenizer), _ANY_LENGTH)
            ids = prompt_token_ids(row.text, tokenizer) if ids is None else ids
            category = Path(file).name.partition(".")[0] if row.category == NO_CATEGORY else row.category
            if len(ids) <= limit:
                found[category].append(ids)
    return found


def spread(rows: list[list[int]], count: int) -> list[list[int]]:
    """Returns so many rows of a category, evenly spread, for files list prompts of a kind side by side."""
    return rows if len(rows) <= count else [rows[index * len(rows) // count] for index in range(count)]


def write_edits(benchmark: Path, out: Path) -> int:
    """Writes tasks of Aider's refactoring benchmark as chats that ask for the whole new file; returns their number.

    `benchmark` is the folder of the tasks; tasks with larger files than `MOST_EDIT_BYTES` are left out.
    """
    lines = []
    for task in sorted(path for path in benchmark.iterdir() if (path / ".docs").is_dir()):
        request = (task / ".docs" / "instructions.md").read_text("utf-8")
        sources = [path for path in sorted(task.glob("*.py")) if not path.name.endswith("_test.py")]
        if len(sources) != 1 or sources[0].stat().st_size > MOST_EDIT_BYTES:
            continue
        code = sources[0].read_text("utf-8")
        content = f"{request}\n\n{sources[0].name}:\n\n```python\n{code}```\n\nAnswer with the whole new file."
        lines.append(json.dumps({"category": "edits", "messages": [{"role": "user", "content": content}]}) + "\n")
    out.write_text("".join(lines), "utf-8")
    return len(lines)

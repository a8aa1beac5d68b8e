"""`verify` must call a wrong text a bug: a proof that cannot fail proves nothing."""

from pathlib import Path
from typing import Any

import pytest
from command_line import run

from foretoken.bench.verify import verify_setups
from foretoken.bench.workload import Workload
from foretoken.engine.acceptor import Acceptor, Outcome
from foretoken.entrypoints.config import parse_setup
from foretoken.models.loading import load_model, load_tokenizer

MODEL = str(Path(__file__).parents[2] / "models" / "tinycode")


def test_a_wrong_engine_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
    real = Acceptor.outcomes

    def wrong_bonus(*arguments: Any) -> tuple[list[Outcome], float]:
        outcomes, lossy_tv = real(*arguments)
        return [o._replace(tokens=[*o.tokens[:-1], 17]) if o.tree_depth else o for o in outcomes], lossy_tv

    monkeypatch.setattr(Acceptor, "outcomes", wrong_bonus)
    setup = parse_setup('{"method": "oracle", "pattern": [2]}')
    workload = Workload(prompts=["import os\n"], temperatures=(0.0, 0.8), max_tokens=12)
    checks = [check for found in verify_setups(model, tokenizer, [setup], workload, batch_sizes=[1]) for check in found]
    assert [check.verdict for check in checks] == ["bug", "bug"]
    assert all(check.gap is not None and check.gap > 1e-3 and not check.is_proof for check in checks)


def test_progress_is_counted_in_tokens() -> None:
    """It grows while a run is under way, never falls, and ends with everything."""
    model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
    workload = Workload(prompts=["import os\n", "x = 1\n"], temperatures=(0.0,), max_tokens=10)
    seen: list[tuple[int, int]] = []
    checked = verify_setups(
        model, tokenizer, [parse_setup("ngram")], workload, batch_sizes=[1, 2],
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert [len(found) for found in checked] == [2, 2]
    done = [one for one, _ in seen]
    assert done == sorted(done)
    assert len(set(done)) > 12  # three runs of twenty tokens: many reports between their ends
    assert seen[-1] == (60, 60)


def test_rules_that_write_another_text_are_compared_at_temperature_0_alone() -> None:
    arguments = ("verify", MODEL, "-s", "draft_model:acceptance=block", "--num-prompts", "1", "--max-tokens", "6")
    refused = run(*arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "the rule 'block' of 'draft_model acceptance=block' gives a seeded request another text" in refused.stderr
    assert run(*arguments, "--temperature", "0").returncode == 0

"""The path of commands for models with recurrent layers: answers, heads that learn from them, checks, text."""

import shutil
from pathlib import Path

import pytest
from command_line import ROOT, report_of
from gguf import GGMLQuantizationType as Type
from models.gguf_files import SMALL, TINYCODE, add_tokenizer
from models.gguf_hybrid_files import write_hybrid
from tiny_models import random_model, tiny_config

METHODS = ["eagle3", "hass", "hydra", "medusa", "mtp"]
SIZES = {**SMALL, "vocab_size": 6144, "max_position_embeddings": 512, "eos_token_id": 0, "head_dim": 16}
QUICK = ("--steps", "2", "--batch-size", "2", "--length", "32", "--warmup-steps", "1", "--num-prompts", "1")
ANSWERS = ("--prompt-tokens", "8", "--max-new-tokens", "24", "--num-documents", "6", "--self-distill", "-s", "ngram")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2"])
def test_heads_from_answers_to_text(architecture: str, tmp_path: Path) -> None:
    """For a GGUF file in 8 bits, and for a directory."""
    model, made = tmp_path / "model.gguf", random_model(tiny_config(architecture, **SIZES))
    if architecture == "qwen3_5":
        write_hybrid(model, made, matrices=Type.Q8_0, adds=[add_tokenizer])
    else:
        model = model.with_suffix("")
        made.bfloat16().save_pretrained(model)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TINYCODE / name, model / name)
    out, text, drafters = str(tmp_path / "data"), str(ROOT / "foretoken/core/*.py"), list[str]()
    assert report_of("data", str(model), "--out", out, "--text", text, *ANSWERS)["train"]["documents"] == 6
    for method in METHODS:
        head = str(tmp_path / method)
        assert report_of("train", method, str(model), "--data", out, "--out", head, *QUICK)["tau_at_temperature_0"] >= 1
        told = report_of("inspect", head, "--verify")
        assert (told["target"]["name"], told["dtypes"], told["findings"]) == (str(model), ["bfloat16"], [])
        drafters += ["-s", f"{told['method']}:mc_sim_7b_63:model={head}"]
    draft, sizes = str(tmp_path / "draft"), ("--set", "num_layers=2")
    assert report_of("train", "draft_model", str(model), "--data", out, "--out", draft, *QUICK, *sizes)["steps"] == 2
    assert report_of("inspect", draft)["weight_dtypes"] == ["BF16"]
    drafters += ["-s", f"draft_model:mc_sim_7b_63:model={draft}"]
    few = ("--num-prompts", "1", "--max-tokens", "12")
    compared = report_of("verify", str(model), *drafters, "--batch-size", "1", *few)["checks"]
    assert [check["verdict"] for check in compared] == ["identical"] * len(drafters)
    assert max(check["mean_acceptance_length"] for check in compared) > 1
    checks = report_of("doctor", str(model), head, *few, code=1)["checks"]  # it has learnt too little
    verdicts = {check["name"]: check["verdict"] for check in checks}
    assert {verdicts[name] for name in ("target logits", "target served", "head fits", "drafting")} == {"ok"}

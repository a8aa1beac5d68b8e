"""Export a checkpoint as a Hugging Face directory: config, bfloat16 weights, tokenizer, generation config, card.

python -m recipes.tinycode.export --run-dir DIR --checkpoint target-decay --out models/tinycode
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from recipes.tinycode.card import write_card
from recipes.tinycode.model import CONFIGS, ModelConfig
from recipes.tinycode.paths import default_run_dir


def hf_config(config: ModelConfig, eos_id: int) -> LlamaConfig:
    """Translate our sizes into a `LlamaConfig` with tied embeddings."""
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=eos_id,
        eos_token_id=eos_id,
        pad_token_id=eos_id,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        use_cache=True,
    )


def export(run_dir: Path, checkpoint: str, model: str, out: Path) -> dict[str, Any]:
    """Write the model directory (all but the card).

    Args:
        run_dir: where the checkpoint and the tokenizer lie.
        checkpoint: checkpoint name, without suffix.
        model: `target` or `draft`.
        out: directory to write; files of the same names are replaced.

    Returns:
        The checkpoint's progress record.
    """
    out.mkdir(parents=True, exist_ok=True)
    state = torch.load(run_dir / f"{checkpoint}.pt", map_location="cpu", weights_only=True)
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in state["model"].items()}
    temporary = out / "model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.replace(out / "model.safetensors")
    for file in (run_dir / "tokenizer").iterdir():
        shutil.copyfile(file, out / file.name)
    eos_id = AutoTokenizer.from_pretrained(out).eos_token_id
    hf_config(CONFIGS[model], eos_id).save_pretrained(out)
    GenerationConfig(bos_token_id=eos_id, eos_token_id=eos_id, pad_token_id=eos_id).save_pretrained(out)
    return state["progress"]


def check(out: Path, prompt: str) -> str:
    """Load the export as a user would, fail on any key mismatch, and return a greedy continuation of `prompt`."""
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    problems = {key: value for key, value in info.items() if value and key != "error_msgs"}
    if problems:
        raise ValueError(f"export {out.name} does not load cleanly: {problems}. Expected every key to match.")
    tokenizer = AutoTokenizer.from_pretrained(out)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=96,
                         do_sample=False)  # fmt: skip
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])


def main() -> None:
    """Export, check, write the card, and for a target the list of files that it was not trained on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, default=default_run_dir())
    parser.add_argument("--model", choices=sorted(CONFIGS), default="target")
    parser.add_argument("--checkpoint", default="target-decay")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    progress = export(args.run_dir, args.checkpoint, args.model, args.out)
    text = json.loads((args.run_dir / "held_out.jsonl").read_text(encoding="utf-8").split("\n", 1)[0])["text"]
    prompt = text[: text.index("\n", 500)]
    print(f"{prompt[-300:]}\n----- continues -----\n{check(args.out, prompt)}")
    write_card(args.run_dir, args.checkpoint, args.model, args.out, progress)
    if args.model == "target":  # whose held-out files the repository lists
        shutil.copyfile(args.run_dir / "held_out.txt", Path(__file__).parent / "held_out.txt")


if __name__ == "__main__":
    main()

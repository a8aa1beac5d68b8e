"""Draft models: where they begin, what they learn from, and that a run which was stopped ends with the same bits."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trained_heads
import training_runs
from tiny_models import ARCHITECTURES, EOS_ID, VOCAB_SIZE, tiny_model
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.heads.base import WindowPositions
from foretoken.models.generic import generate_plain, run_plain
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import wrap_model
from foretoken.models.smaller import fresh_model, kept_layers, pruned_model, with_attention
from foretoken.training.data.packed import Document, PackedForm, PackedTokens, PackedWriter
from foretoken.training.draft_model import (
    Distillation,
    DraftWriter,
    MixedText,
    ModelTrainer,
    Writer,
    new_student,
    written_windows,
)
from foretoken.training.evaluation import CHAIN, EvaluationConfig, model_evaluator
from foretoken.training.run import train_model
from foretoken.training.run_state import saved_states
from foretoken.training.train import train
from foretoken.training.trainer import drawn_positions, train_config


def windows(count: int = 4, length: int = 16) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(3, VOCAB_SIZE, (count, length), generator=torch.Generator().manual_seed(3))
    return tokens, torch.ones_like(tokens, dtype=torch.bool)


# --- where a draft model begins


@pytest.mark.parametrize(
    ("num_layers", "count", "kept"),
    [(12, 2, [0, 11]), (12, 3, [0, 6, 11]), (12, 12, list(range(12))), (5, 1, [0]), (36, 4, [0, 12, 23, 35])],
)
def test_kept_layers_are_evenly_spaced(num_layers: int, count: int, kept: list[int]) -> None:
    assert kept_layers(num_layers, count) == kept


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3_5"])
def test_a_layer_of_attention_is_kept(architecture: str) -> None:
    """Models with recurrent layers run only with one; the nearest layer makes room for it."""
    target = wrap_model(tiny_model(architecture), name="tiny")
    (attention,) = (i for i, kind in enumerate(target.config.layer_types) if kind == "full_attention")
    layers = with_attention([attention - 1], target.config)
    assert layers == [attention]
    for model in (pruned_model(target, layers), fresh_model(target, {"num_hidden_layers": 1}, seed=0)):
        run_plain(model.module, windows()[0], use_cache=True)
    assert with_attention([0, 3], SimpleNamespace(layer_types=["linear_attention"] * 4)) == [0, 3]


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "gemma2", "gpt2", "qwen3_moe", "smollm3"])
def test_a_pruned_model_is_the_target_without_some_layers(architecture: str) -> None:
    """With all layers it computes the same logits; with two of three it skips the middle one."""
    target = wrap_model(tiny_model(architecture), name="tiny")
    tokens, _ = windows()
    whole = pruned_model(target, [0, 1, 2])
    assert torch.equal(run_plain(whole.module, tokens).logits, run_plain(target.module, tokens).logits)
    pruned = pruned_model(target, [0, 2])
    assert pruned.num_layers == 2
    after = [run_plain(model.module, tokens, output_hidden_states=True).hidden_states for model in (pruned, target)]
    assert torch.equal(after[0][1], after[1][1]), "the first layer is the target's"
    assert not torch.equal(run_plain(pruned.module, tokens).logits, run_plain(target.module, tokens).logits)
    with torch.no_grad():  # a layer that adds nothing may as well be missing
        (middle,) = [
            part
            for name, part in target.module.named_modules()
            if name.endswith("layers.1") or name == "transformer.h.1"
        ]
        middle.forward = lambda hidden, *_, **__: hidden
    torch.testing.assert_close(run_plain(pruned.module, tokens).logits, run_plain(target.module, tokens).logits)


def test_layers_of_other_kinds_are_refused_in_a_sentence() -> None:
    """The first layer of this architecture has another shape than the rest."""
    target = wrap_model(tiny_model("deepseek_v3"), name="tiny")
    assert "deepseek_v3" in ARCHITECTURES
    with pytest.raises(
        ConfigError, match=r"a smaller model like 'tiny' cannot be made: .* Begin from a model with --in"
    ):
        pruned_model(target, [1, 2])


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_a_fresh_model_has_the_sizes_and_weights_of_its_seed(architecture: str) -> None:
    target = wrap_model(tiny_model(architecture), name="tiny")
    sizes = {
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "n_embd" if architecture == "gpt2" else "hidden_size": 16,
    }
    before = torch.get_rng_state()
    one, same, other = (fresh_model(target, sizes, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert (one.config.hidden_size, one.num_layers, one.vocab_size) == (16, 4, target.vocab_size)
    assert one.eos_ids == target.eos_ids
    weights = [next(model.module.parameters()) for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_beginning_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    target, tokenizer = trained_heads.target(), trained_heads.tokenizer()

    def refused(match: str, init: str | None = None, **sizes: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            new_student(target, tokenizer, init=init, sizes=sizes, seed=0)

    refused("a draft model needs a beginning. Expected --init MODEL")
    refused("num_layers is 4. Expected 1 to 3, the layers of the target", num_layers=4)
    refused("num_layers is 'two'. Expected a number", num_layers="two")
    refused("the draft model has no size 'hiden_size'. .*hidden_size", hiden_size=16)
    refused("the draft model has no size 'vocab_size'", vocab_size=16, num_layers=1)
    refused("hidden_size is 0. Expected a number of at least 1", hidden_size=0)
    target.module.save_pretrained(tmp_path / "bare")  # type: ignore[operator]
    refused("--init '.*bare' has another tokenizer than 'tiny-0'", str(tmp_path / "bare"))
    (tmp_path / "other").mkdir()
    target.module.save_pretrained(tmp_path / "other")  # type: ignore[operator]
    AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "tinycode").save_pretrained(tmp_path / "other")
    refused("--init '.*other' has another tokenizer than 'tiny-0'", str(tmp_path / "other"))


# --- what it learns


FORMULAS = {
    "ce_weight": lambda p, q, label: -q.gather(-1, label.unsqueeze(-1)).squeeze(-1).log(),
    "kl_weight": lambda p, q, label: (p * (p / q).log()).sum(-1),
    "rkl_weight": lambda p, q, label: (q * (q / p).log()).sum(-1),
    "tv_weight": lambda p, q, label: (p - q).abs().sum(-1) / 2,
    "jsd_weight": lambda p, q, label: (
        0.3 * (p * (p / (0.3 * p + 0.7 * q)).log()).sum(-1) + 0.7 * (q * (q / (0.3 * p + 0.7 * q)).log()).sum(-1)
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_those_of_the_formula(name: str) -> None:
    """Over the labels of a batch, micro-batch by micro-batch; against autograd through whole models in float64."""
    target, student = training_runs.target(), training_runs.student()
    weights = {"kl_weight": 0.0, name: 1.0, "jsd_beta": 0.3}
    config = train_config({"batch_size": 4, "micro_batch_size": 3, "length": 16, "clip_norm": 1e9})
    trainer = ModelTrainer(student, target, Distillation(**weights), config, training_runs.batches())
    tokens, supervised = training_runs.batches().batch(0, batch_size=4, length=16, seed=0)
    assert not supervised.all()
    sums = trainer._gradients(0, tokens, supervised, trainer._counts(supervised))
    exact = [in_float64(model.module) for model in (training_runs.target(), training_runs.student())]
    is_label = supervised[:, 1:]
    p = log_softmax(run_plain(exact[0], tokens).logits, -1).exp()[:, :-1][is_label].clone()
    q = exact[1].train()(tokens).logits.softmax(-1)[:, :-1][is_label]
    loss = FORMULAS[name](p, q, tokens[:, 1:][is_label]).mean()
    loss.backward()
    assert float(sums.loss / sums.count) == pytest.approx(float(loss.detach()), rel=1e-5)
    for (key, own), (_, wanted) in zip(student.module.named_parameters(), exact[1].named_parameters(), strict=True):
        assert wanted.grad is not None
        torch.testing.assert_close(
            own.grad.double(), wanted.grad, rtol=1e-3, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


def in_float64(module: Any) -> Any:
    """A copy in float64, with its own attention and gradients."""
    copied = tiny_model("llama", **{**training_runs.TINY, "num_hidden_layers": module.config.num_hidden_layers})
    copied.load_state_dict(module.state_dict())
    return copied.double().requires_grad_()


def test_sharp_targets_are_distributions_at_their_temperature() -> None:
    target, student = training_runs.target(), training_runs.student()
    config = train_config({"batch_size": 4, "length": 16})
    tokens, supervised = windows()
    trainer = ModelTrainer(student, target, Distillation(target_temperature=0.5), config, training_runs.batches())
    sums = trainer._gradients(0, tokens, supervised, trainer._counts(supervised))
    p = (run_plain(target.module, tokens).logits[:, :-1] / 0.5).softmax(-1)
    q = run_plain(student.module, tokens).logits[:, :-1].softmax(-1)
    assert float(sums.loss / sums.count) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)


def test_windows_are_read_at_shifted_positions() -> None:
    """The first tokens keep their positions, later ones see them across the jump; the target reads the text itself."""
    target, student = training_runs.target(), training_runs.student()
    config = train_config({"batch_size": 4, "length": 16, "max_offset": 60, "seed": 2})
    tokens, supervised = windows()
    trainer = ModelTrainer(student, target, Distillation(), config, training_runs.batches())
    sums = trainer._gradients(0, tokens, supervised, trainer._counts(supervised))
    anchor, offset = drawn_positions(config, 0)
    assert offset.unique().numel() > 1
    places = WindowPositions(anchor, offset).of(torch.arange(16))
    causal = torch.zeros(16, 16).masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril(), float("-inf"))
    student.module.set_attn_implementation("eager")  # type: ignore[operator]
    inputs = {"position_ids": places, "attention_mask": causal.expand(4, 1, 16, 16)}
    with torch.inference_mode():
        q = student.module(tokens, use_cache=False, **inputs).logits[:, :-1].softmax(-1)
    p = run_plain(target.module, tokens).logits[:, :-1].softmax(-1)
    assert float(sums.loss / sums.count) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)


# --- written text


def written(writer: Writer, temperature: float = 1.0, seed: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    tokens, supervised = windows()
    seeds = range(100 * seed, 100 * seed + len(tokens))
    return written_windows(
        writer, tokens, supervised, seeds, temperature=temperature, prompt_share=0.25, **options
    )  # fmt: skip


def until_eos(tokens: Sequence[int]) -> list[int]:
    """The tokens up to the end-of-sequence token, that included."""
    found = list(tokens)
    return found[: found.index(EOS_ID) + 1] if EOS_ID in found else found


def test_text_is_what_the_draft_model_writes_with_its_present_weights() -> None:
    student = training_runs.student()
    writer = DraftWriter(student, dtype=torch.float32, length=16, at_once=4)
    prompts, _ = windows()
    texts = []
    for scale in (1.0, -0.7):
        with torch.no_grad():
            student.module.get_output_embeddings().weight.mul_(scale)  # type: ignore[operator]
        writer.follow()
        tokens, is_label = written(writer, temperature=0.0)
        assert torch.equal(tokens[:, :4], prompts[:, :4])
        for row in range(len(tokens)):
            text = until_eos(generate_plain(student.module, prompts[row, :4].tolist(), 12))
            assert tokens[row, 4 : 4 + len(text)].tolist() == text
            assert is_label[row].tolist() == [False] * 4 + [True] * len(text) + [False] * (12 - len(text))
        texts.append(tokens)
    assert not torch.equal(*texts)


def test_drawn_text_depends_on_its_seed_alone() -> None:
    """Not on the batch; and it is the text that the engine draws with this seed."""
    student = training_runs.student()
    few, many = (DraftWriter(student, dtype=torch.float32, length=16, at_once=count) for count in (3, 4))
    one, again, other = written(few)[0], written(many)[0], written(few, seed=1)[0]
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in range(4)]
    outputs = LLM(student, generation_config="vllm", allow_unknown_ids=True).generate(one[:, :4].tolist(), params)
    for row, output in zip(one.tolist(), outputs, strict=True):
        assert until_eos(row[4:])[: len(output.outputs[0].token_ids)] == output.outputs[0].token_ids


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_text_of_decoders_without_a_choice_of_tokens(architecture: str) -> None:
    model = wrap_model(tiny_model(architecture), name="tiny")
    tokens, _ = written(Writer(model, length=16, at_once=4))
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in range(4)]
    outputs = LLM(model, runner="generic", allow_unknown_ids=True).generate(tokens[:, :4].tolist(), params)
    assert [until_eos(row[4:]) for row in tokens.tolist()] == [until_eos(o.outputs[0].token_ids) for o in outputs]


def test_prompts_and_padding_are_no_labels() -> None:
    """A prompt goes on to the next label of the data, as to the answer in a conversation."""

    class Fixed(Writer):
        def write(
            self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, temperature: float
        ) -> list[list[int]]:
            assert [len(prompt) for prompt in prompts] == [2, 5, 2]
            return [[60, EOS_ID], [61, 62, 63], [60] * 6]

    tokens, supervised = windows(3, 8)
    supervised[1, 2:5] = False
    supervised[2] = False  # no label at all: the prompt ends at its share
    writer = Fixed(training_runs.target(), length=8, at_once=3)
    arguments: dict[str, Any] = {"temperature": 1.0, "prompt_share": 0.25}
    made, is_label = written_windows(writer, tokens, supervised, [0, 1, 2], **arguments)
    assert made[0].tolist() == [*tokens[0, :2].tolist(), 60, EOS_ID, *tokens[0, 4:].tolist()]
    assert made[1].tolist() == [*tokens[1, :5].tolist(), 61, 62, 63]
    assert [row.nonzero()[:, 0].tolist() for row in is_label] == [[2, 3], [5, 6, 7], [2, 3, 4, 5, 6, 7]]
    _, is_label = written_windows(writer, tokens, supervised, [0, 1, 2], **arguments, supervise_all=True)
    assert [row.nonzero()[:, 0].tolist() for row in is_label] == [[0, 1, 2, 3], [0, 1, 5, 6, 7], [2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(("on_policy", "teacher"), [(0.7, 0.3), (0.5, 0.2), (0.0, 0.25), (1.0, 0.0)])
def test_shares_of_batches(on_policy: float, teacher: float) -> None:
    objective = Distillation(on_policy=on_policy, teacher=teacher)
    authors = [objective.author(step) for step in range(1000)]
    assert authors.count("draft") == pytest.approx(1000 * on_policy, abs=2)
    assert authors.count("target") == pytest.approx(1000 * teacher, abs=3)
    for begin in range(0, 1000, 50):
        assert authors[begin : begin + 50].count("draft") == pytest.approx(50 * on_policy, abs=2)


def test_batches_are_of_their_authors() -> None:
    """Text of the draft model and of the target, and the data; the same until the block ends."""
    student, target = training_runs.student(), training_runs.target()
    objective = Distillation(on_policy=0.4, teacher=0.3, temperature=0.0, refresh_steps=8)
    data = training_runs.batches(is_partial=False)
    text = MixedText(
        data, objective, DraftWriter(student, dtype=torch.float32, length=16, at_once=32),
        Writer(target, length=16, at_once=32), batch_size=4, length=16,
    )  # fmt: skip
    seen = set()
    for step in range(8):
        arguments = {"batch_size": 4, "length": 16, "seed": 0}
        tokens, _ = text.batch(step, **arguments)
        fixed, _ = data.batch(step, **arguments)
        author = objective.author(step)
        seen.add(author)
        for row in range(4):
            wanted = fixed[row, 4:].tolist()
            if author is not None:
                model = student if author == "draft" else target
                wanted = until_eos(generate_plain(model.module, fixed[row, :4].tolist(), 12))
            assert tokens[row, 4 : 4 + len(wanted)].tolist() == wanted
    assert seen == {"draft", "target", None}
    assert int(text.written[0]) == int(text.supervised.sum())
    kept = text.tokens.clone()
    with torch.no_grad():
        student.module.get_output_embeddings().weight.mul_(-1)  # type: ignore[operator]
    for first_step, is_kept in ((0, True), (8, False)):
        for step in range(first_step, first_step + 8):
            text.batch(step, **arguments)
        assert torch.equal(text.tokens, kept) == is_kept


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 13, VOCAB_SIZE - 3])
def test_vocabularies_of_other_padding(vocab_size: int) -> None:
    """The shared tokens are learned and written; logits of the others get no gradient."""
    student = wrap_model(tiny_model("llama", **training_runs.TINY, vocab_size=vocab_size), name="padded")
    config = train_config({"batch_size": 4, "length": 16, "schedule": {"num_steps": 3}})
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB_SIZE - 3, (800,), generator=generator).numpy().astype("uint16")
    objective = Distillation(on_policy=0.5, teacher=0.5)
    trainer = ModelTrainer(student, training_runs.target(), objective, config, PackedTokens(tokens, None, {}))
    before = student.module.get_output_embeddings().weight.detach().clone()  # type: ignore[operator]
    assert len(list(trainer.steps())) == 3
    assert trainer._text is not None
    assert int(trainer._text.tokens.max()) < min(vocab_size, VOCAB_SIZE)
    after = student.module.get_output_embeddings().weight.detach()  # type: ignore[operator]
    has_moved = ((after - before).abs() > 1e-4).any(1)
    assert has_moved[: min(vocab_size, VOCAB_SIZE)].all()
    assert not has_moved[VOCAB_SIZE:].any()


# --- evaluation


def test_acceptance_rates_of_a_draft_model() -> None:
    target, student = training_runs.target(), training_runs.student()
    tokens, supervised = windows(6, 32)
    evaluation = EvaluationConfig(every=1, tokens=tokens, supervised=supervised)
    found = model_evaluator(evaluation, student, target, precision=torch.float32)()
    matches, runs = [], []
    for row in tokens.tolist():
        text = row[:8] + until_eos(generate_plain(target.module, row[:8], 24))
        best = run_plain(student.module, torch.tensor([text])).logits[0, :-1].argmax(-1)
        right = (best == torch.tensor(text[1:]))[7:].tolist()
        matches += right
        runs += [right[at : at + CHAIN] for at in range(len(right) - CHAIN + 1)]
    assert found["held_out_alpha"][0] == pytest.approx(sum(matches) / len(matches))
    depths = [sum(all(run[:depth]) for run in runs) / len(runs) for depth in range(1, CHAIN + 1)]
    assert found["held_out_acceptance"] == pytest.approx(depths)
    assert found["held_out_tau"] == pytest.approx(1 + sum(depths))
    text, is_label = written_windows(
        Writer(target, length=32, at_once=6), tokens, supervised, range(6), temperature=1.0, prompt_share=0.25
    )  # fmt: skip
    p, q = (run_plain(model.module, text).logits.softmax(-1)[:, :-1] for model in (target, student))
    overlap = torch.minimum(p, q).sum(-1)[is_label[:, 1:]].mean()
    assert found["held_out_alpha"][1] == pytest.approx(float(overlap), abs=1e-5)
    twin = pruned_model(target, [0, 1])
    same = model_evaluator(evaluation, twin, target, precision=torch.float32)()
    assert same["held_out_tau"] == CHAIN + 1
    assert same["held_out_alpha"] == pytest.approx([1.0, 1.0], abs=1e-5)


# --- runs


@pytest.mark.parametrize(
    "weights",
    [
        {"on_policy": 0.6, "teacher": 0.2},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"on_policy": 1.0, "refresh_steps": 3}, {})),
    ],
)
def test_a_run_that_is_stopped_after_every_step_ends_with_the_same_bits(
    tmp_path: Path, weights: dict[str, Any]
) -> None:
    """The text of a block was written with weights that are gone when the run goes on in the middle of the block."""

    def run(name: str, on_step: Any = None) -> LoadedModel:
        student = training_runs.student()
        settings = training_runs.model_settings(tmp_path / name, save_every_s=-1.0, **weights)
        train_model(training_runs.target(), student, training_runs.batches(), settings, on_step=on_step)
        return student

    whole = run("whole")
    for _ in range(10):
        # The exception comes after a step, before its checkpoint: every second step is done again.
        states = saved_states(tmp_path / "parts")
        begun = int(states[-1].name[-8:]) if states else 0
        with pytest.raises(training_runs.StopError):
            run("parts", training_runs.stop_after(begun + 2))
    training_runs.same_weights(training_runs.weights_of(run("parts")), training_runs.weights_of(whole))
    start = training_runs.weights_of(training_runs.student())
    assert not torch.equal(whole.module.state_dict()["lm_head.weight"], start["lm_head.weight"])


def test_another_beginning_is_another_run(tmp_path: Path) -> None:
    target, data = training_runs.target(), training_runs.batches()
    settings = training_runs.model_settings(tmp_path, num_steps=1)
    train_model(target, training_runs.student(), data, settings)
    for changes in ({"num_steps": 1, "on_policy": 0.5}, {"num_steps": 2}):
        other = training_runs.model_settings(tmp_path, **changes)
        with pytest.raises(ConfigError, match="holds a run with other settings; they differ in"):
            train_model(target, training_runs.student(), data, other)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed tokens of what the tiny target writes, and of as much held-out text."""
    place = tmp_path_factory.mktemp("data")
    trained_heads.write_target(place / "target")
    prompts = torch.randint(3, VOCAB_SIZE, (48, 6), generator=torch.Generator().manual_seed(9)).tolist()
    params = [SamplingParams(max_tokens=40, seed=seed, ignore_eos=True) for seed in range(48)]
    texts = [
        [*prompt, *output.outputs[0].token_ids]
        for prompt, output in zip(prompts, LLM(trained_heads.target()).generate(prompts, params), strict=True)
    ]
    for part, documents in (("train", texts[:40]), ("held_out", texts[40:])):
        writer = PackedWriter(place / "packed" / part, PackedForm.of(trained_heads.tokenizer()))
        for document in documents:
            writer.add(Document(document))
        writer.finish()
        writer.close()
    return place


def test_training_raises_acceptance_and_the_result_is_a_model(data: Path, tmp_path: Path) -> None:
    """A pruned model learns to draft; transformers loads the result, and the engine drafts with it without loss."""
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in trained_heads.PROMPTS[:3])
    )
    result = train(
        "draft_model", data / "target", data=data / "packed", out=tmp_path / "draft", sizes={"num_layers": 2},
        objective={"tv_weight": 1.0, "on_policy": 0.5, "refresh_steps": 8}, steps=120, lr=1e-2, warmup_steps=5,
        batch_size=8, length=32, eval_every=40, prompts=str(tmp_path / "prompts.jsonl"), num_prompts=3, device="cpu",
    )  # fmt: skip
    alphas = [line["held_out_alpha"] for line in training_runs.metrics(result.run_dir) if "held_out_alpha" in line]
    target, tokens = trained_heads.target(), torch.tensor(trained_heads.texts().texts[0]).unsqueeze(0)
    start = pruned_model(target, [0, 2])
    p, q = (run_plain(model.module, tokens).logits.softmax(-1) for model in (target, start))
    assert alphas[-1][1] > float(torch.minimum(p, q).sum(-1).mean()) + 0.1
    assert alphas[-1][1] > alphas[0][1]
    assert result.facts["written_tokens"] > 0
    assert result.tau[120] == pytest.approx(1 + sum(result.acceptance[120]))
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "the target's layers 0, 2" in card
    assert f"tau at temperature 0 | {result.facts['tau_at_temperature_0']:.2f}" in card
    stored = json.loads((tmp_path / "draft" / "training.json").read_text())
    assert stored["settings"]["origin"] == {"target_layers": [0, 2]}
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert module.config.num_hidden_layers == 2
    assert module.dtype == torch.float32, "as in the target's files"
    assert AutoTokenizer.from_pretrained(tmp_path / "draft").get_vocab() == trained_heads.tokenizer().get_vocab()
    config = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": CHAIN}
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    for params in (SamplingParams(temperature=0.0, max_tokens=30), SamplingParams(max_tokens=30, seed=4)):
        plain = LLM(str(data / "target"), device="cpu").generate(prompts, params)
        drafted = LLM(str(data / "target"), speculative_config=config, device="cpu").generate(prompts, params)
        if not params.temperature:
            assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
        assert sum(sum(output.metrics.accepted_at_depth) for output in drafted) > 0


def test_options_of_heads_are_refused(data: Path, tmp_path: Path) -> None:
    def refused(match: str, **changes: Any) -> None:
        arguments = {"data": data / "packed", "out": tmp_path / "out", "sizes": {"num_layers": 1}, "length": 32}
        with pytest.raises(ConfigError, match=match):
            train("draft_model", data / "target", **{**arguments, **changes}, device="cpu")

    refused("--cache is for heads, and draft_model trains a whole model", cache=tmp_path / "cache")
    refused("--max-offset is 65. Expected 0 to 64", max_offset=65)
    refused("--draft-vocab is for heads", draft_vocab=tmp_path / "vocab.json")
    refused("--joint is for heads", joint={"backbone": "lora"})
    refused("--init sets the sizes", init="models/tinycode-draft")
    refused("--length is 200, and the draft model has a context of 96", length=200, batch_size=1)
    refused("on_policy and teacher are shares of the batches", objective={"on_policy": 0.8, "teacher": 0.4})
    refused("the objective of draft_model .*feature_weight", objective={"feature_weight": 1.0})
    refused("With all weights 0 there is nothing to learn", objective={"kl_weight": 0})
    assert not (tmp_path / "out").exists()

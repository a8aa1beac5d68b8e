"""An accelerated model's `generate` gives what transformers' own gives, and leaves no trace when released.

Slow because models are accelerated and released for each change that a caller can make to them.
"""

import copy
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import tokenizer
from gguf import GGMLQuantizationType as Type
from models.gguf_files import tiny_file
from pairwise import slow_products
from tiny_models import EOS_ID, VOCAB_SIZE, tiny_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

import foretoken
from foretoken.core.errors import ConfigError
from foretoken.drafting.goodput import Goodput
from foretoken.hf import accelerate, release

pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
PAD = 0
ROWS = [[5, 9, 3, 5, 9, 3, 5, 9], [7, 8], [11, 4, 30, 21, 6]]


def batch(rows: list[list[int]] = ROWS) -> dict[str, torch.Tensor]:
    """Rows as a tokenizer pads them for generation."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[PAD] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


@pytest.fixture
def model() -> Any:
    module = tiny_model("llama", dtype=torch.float64)
    module.generation_config.pad_token_id = PAD
    return module


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="foretoken"):
        yield caplog


class EveryCall(StoppingCriteria):
    """Notes every call; ends a row once it holds a token."""

    def __init__(self, token: int = -1) -> None:
        self.calls: list[tuple[list[list[int]], Any]] = []
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((input_ids.tolist(), scores))
        return (input_ids[:, 8:] == self.token).any(1)


class Puts(BaseStreamer):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.given.append("end")


def both(model: Any, *, drafter: Any = "ngram", inputs: Any = None, **keywords: Any) -> tuple[Any, Any]:
    """What the model gives by itself and accelerated."""
    inputs = batch() if inputs is None else inputs
    own = model.generate(**inputs, **copy.deepcopy(keywords))
    with accelerate(model, drafter, tokenizer=tokenizer()) as acceleration:
        ours = model.generate(**inputs, **keywords)
        assert acceleration.llm.get_metrics()
    return own, ours


GREEDY: dict[str, dict[str, Any]] = {
    "defaults": {},
    "new tokens": {"max_new_tokens": 24},
    "length": {"max_length": 23},
    "one": {"max_new_tokens": 1},
    "several ends": {"max_new_tokens": 40, "eos_token_id": [EOS_ID, 7, 30, 12]},
    "no end": {"max_new_tokens": 30, "eos_token_id": None},
    "least": {"max_new_tokens": 30, "min_new_tokens": 9, "eos_token_id": [EOS_ID, 7, 30, 12]},
    "least length": {"max_new_tokens": 30, "min_length": 17, "eos_token_id": [EOS_ID, 7, 30, 12]},
    "penalty": {"max_new_tokens": 24, "repetition_penalty": 1.4},
    "bad words": {"max_new_tokens": 24, "bad_words_ids": [[7], [5, 9], [EOS_ID], [30, 21, 6]]},
    "suppressed": {"max_new_tokens": 24, "suppress_tokens": [7, 12, 60]},
    "config": {"generation_config": GenerationConfig(max_new_tokens=12, eos_token_id=[7, 30], pad_token_id=1)},
    "copies": {"max_new_tokens": 9, "num_return_sequences": 2},
    "no cache": {"max_new_tokens": 9, "use_cache": False},
}  # fmt: skip


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_ids_are_those_of_transformers(name: str, model: Any, log: pytest.LogCaptureFixture) -> None:
    if name == "copies":  # transformers refuses several greedy sequences of one prompt
        with accelerate(model), pytest.raises(ValueError, match="num_return_sequences"):
            model.generate(**batch(), **GREEDY[name])
        return
    own, ours = both(model, **GREEDY[name])
    assert ours.dtype == own.dtype
    assert ours.tolist() == own.tolist()
    assert not log.records


@pytest.mark.parametrize("drafter", ["suffix", {"method": "recycling", "num_speculative_tokens": 6}, "a draft model"])
def test_drafters(drafter: Any, model: Any) -> None:
    if drafter == "a draft model":
        drafter = tiny_model("llama", dtype=torch.float64, num_hidden_layers=2)
    own, ours = both(model, drafter=drafter, max_new_tokens=30)
    assert ours.tolist() == own.tolist()


def test_inputs_without_mask_or_padding(model: Any) -> None:
    for inputs in ({"inputs": torch.tensor([ROWS[0]])}, {"input_ids": batch()["input_ids"]}, {}):
        own, ours = both(model, inputs=inputs, max_new_tokens=9)
        assert ours.tolist() == own.tolist()


def test_streamers_and_criteria_see_every_token(model: Any) -> None:
    seen = []
    for accelerated in (False, True):
        criteria, streamer = EveryCall(), Puts()
        if accelerated:
            accelerate(model, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1})
        output = model.generate(
            torch.tensor([ROWS[0]]), max_new_tokens=20, stopping_criteria=StoppingCriteriaList([criteria]),
            streamer=streamer, return_dict_in_generate=True,
        )  # fmt: skip
        assert type(output) is GenerateDecoderOnlyOutput
        seen.append((output.sequences.tolist(), criteria.calls, streamer.given))
    assert seen[0] == seen[1]
    assert len(seen[0][1]) == 20
    release(model)


@pytest.mark.parametrize("eos", [EOS_ID, None])
def test_criteria_end_rows_one_by_one(eos: int | None, model: Any) -> None:
    """Rows that are over are padded; without an end-of-sequence token transformers lets them go on instead."""
    free = model.generate(**batch(), max_new_tokens=20)
    token = int(free[1, 12])
    ids = []
    for accelerated in (False, True):
        criteria = EveryCall(token)
        if accelerated:
            accelerate(model)
        ids.append(
            model.generate(**batch(), max_new_tokens=20, eos_token_id=eos, stopping_criteria=[criteria]).tolist()
        )
        ids.append(criteria.calls)
    assert ids[:2] == ids[2:]
    assert (PAD in ids[0][1][8:]) == (eos is not None)
    release(model)


def test_stop_strings(model: Any) -> None:
    free = model.generate(**batch(ROWS[:1]), max_new_tokens=30)
    stop = tokenizer().decode(free[0, 14:16].tolist())
    own, ours = both(model, inputs=batch(ROWS[:1]), max_new_tokens=30, stop_strings=[stop], tokenizer=tokenizer())
    assert ours.tolist() == own.tolist()
    assert ours.shape[1] < free.shape[1]
    with accelerate(model, tokenizer=tokenizer()):
        assert model.generate(**batch(ROWS[:1]), max_new_tokens=30, stop_strings=stop).tolist() == own.tolist()
    with accelerate(model), pytest.raises(ValueError, match="tokenizer"):
        model.generate(**batch(ROWS[:1]), max_new_tokens=30, stop_strings=stop)


@pytest.mark.parametrize(
    "keywords",
    [
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_k": 0, "top_p": 0.3},
        {"temperature": 1.5, "top_k": 0, "min_p": 0.25},
        {"top_k": 5, "repetition_penalty": 3.0},
    ],
)
def test_sampled_distribution_is_that_of_transformers_warpers(keywords: dict[str, Any], model: Any) -> None:
    """Chi-square over two tokens at 500 draws, above its 1e-4 quantile; with another temperature the test fails."""
    prompt, num = torch.tensor([ROWS[0]]), 500
    common = {"do_sample": True, "max_new_tokens": 2, "min_new_tokens": 2, **keywords}

    def law() -> dict[tuple[int, int], float]:
        probs: dict[tuple[int, int], float] = {}
        detail = {**common, "output_scores": True, "return_dict_in_generate": True}
        first = model.generate(prompt, **{**detail, "max_new_tokens": 1, "min_new_tokens": 1}).scores[0][0].softmax(0)
        for token in first.nonzero()[:, 0].tolist():
            longer = torch.cat([prompt, torch.tensor([[token]])], dim=1)
            second = model.generate(longer, **{**detail, "max_new_tokens": 1, "min_new_tokens": 1}).scores[0][0]
            for other in second.isfinite().nonzero()[:, 0].tolist():
                probs[token, other] = float(first[token] * second.softmax(0)[other])
        return probs

    expected = law()
    with accelerate(
        model, {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}, seed=1, max_num_seqs=64
    ):
        ids = model.generate(prompt.repeat(num, 1), **common)[:, -2:].tolist()
        other = model.generate(prompt.repeat(num, 1), **{**common, "temperature": 4.0})[:, -2:].tolist()

    def statistic(pairs: list[list[int]]) -> tuple[float, int]:
        counts: dict[Any, int] = {}
        for pair in pairs:
            key = tuple(pair) if expected.get(tuple(pair), 0.0) * num >= 5 else "rare"
            counts[key] = counts.get(key, 0) + 1
        cells: dict[Any, float] = {"rare": 1e-9}
        for key, p in expected.items():
            cells[key if p * num >= 5 else "rare"] = cells.get(key if p * num >= 5 else "rare", 0.0) + p
        total = sum((counts.get(key, 0) - num * p) ** 2 / (num * p) for key, p in cells.items() if p * num >= 1)
        return total, len(cells)

    value, cells = statistic(ids)
    limit = cells + 4 * (2 * cells) ** 0.5 + 10  # above the 1e-4 quantile of chi-square
    assert value < limit
    assert statistic(other)[0] > limit
    assert all(tuple(pair) in expected for pair in ids)


def test_seeds_are_the_engines_own(model: Any) -> None:
    def draws(**options: Any) -> list[Any]:
        with accelerate(model, **options):
            return [model.generate(**batch(), do_sample=True, max_new_tokens=12).tolist() for _ in range(2)]

    torch.manual_seed(0)
    first = draws(seed=3)
    torch.manual_seed(1)
    assert draws(seed=3) == first
    assert first[0] != first[1]
    before = torch.random.get_rng_state()
    draws()
    assert torch.equal(before, torch.random.get_rng_state())


THEIRS: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "num_beams"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "processors": (
        {"logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor([7])])}, "argument logits_processor"
    ),
    "prefix": ({"prefix_allowed_tokens_fn": lambda row, ids: [4, 5, 6]}, "argument prefix_allowed_tokens_fn"),
    "ngrams": ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
    "typical": ({"typical_p": 0.9, "do_sample": True, "top_k": 1}, "typical_p"),
    "static": ({"cache_implementation": "static"}, "cache_implementation"),
    "too long": ({"max_new_tokens": 200}, "longer than the engine's context"),
    "too hot": ({"do_sample": True, "top_k": 1, "temperature": 200.0}, "temperature"),
}  # fmt: skip


@pytest.mark.parametrize("name", THEIRS)
def test_what_transformers_serves_is_logged_once(name: str, model: Any, log: pytest.LogCaptureFixture) -> None:
    keywords, reason = THEIRS[name]
    keywords = {"max_new_tokens": 6, **keywords}
    own = model.generate(**batch(), **keywords)
    with accelerate(model):
        for _ in range(2):
            ours = model.generate(**batch(), **keywords)
            assert getattr(ours, "sequences", ours).tolist() == getattr(own, "sequences", own).tolist()
    (record,) = [each for each in log.records if each.name.startswith("foretoken")]
    assert record.getMessage().startswith("generate() is served by transformers, without speculation: ")
    assert reason in record.getMessage()


def test_other_inputs_and_masks_are_transformers(model: Any, log: pytest.LogCaptureFixture) -> None:
    inputs = batch()
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    calls: list[dict[str, Any]] = [
        {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]},
        {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"].flip(1)},
        {**inputs, "position_ids": inputs["attention_mask"].cumsum(1) - 1},
        {**inputs, "assistant_model": None, "prompt_lookup_num_tokens": 2, "input_ids": torch.tensor([ROWS[0]]),
         "attention_mask": torch.ones(1, 8, dtype=torch.long)},
    ]  # fmt: skip
    own = [model.generate(**call, max_new_tokens=5).tolist() for call in calls]
    with accelerate(model):
        assert [model.generate(**call, max_new_tokens=5).tolist() for call in calls] == own
    reasons = [each.getMessage().partition(": ")[2] for each in log.records if each.name.startswith("foretoken")]
    assert [reason.split(" is ")[0] for reason in reasons] == [
        "the argument inputs_embeds", "the attention mask hides more than padding on the left",
        "the argument position_ids", "prompt_lookup_num_tokens",
    ]  # fmt: skip


def test_wrong_arguments_raise_what_transformers_raises(model: Any) -> None:
    with accelerate(model):
        for keywords in ({"max_new_tokns": 5}, {"temperature": -1.0, "do_sample": True}, {"max_length": 3}):
            with pytest.raises(ValueError):  # noqa: PT011 - whatever its sentence is
                model.generate(**batch(), **keywords)


def test_training_mode_and_autocast_are_left_to_transformers(model: Any, log: pytest.LogCaptureFixture) -> None:
    with accelerate(model):
        model.train()
        model.generate(**batch(), max_new_tokens=2)
        model.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.generate(**batch(), max_new_tokens=2)
    told = [each.getMessage() for each in log.records if each.name.startswith("foretoken")]
    assert ["training mode" in told[0], "autocast" in told[1], len(told)] == [True, True, 2]


def test_changed_weights_are_seen(model: Any) -> None:
    with accelerate(model, runner="lean-stock") as acceleration:
        first, engine = model.generate(**batch(), max_new_tokens=12), acceleration.llm
        model.generate(**batch(), max_new_tokens=12)
        assert acceleration.llm is engine
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-0.7)
        changed = model.generate(**batch(), max_new_tokens=12)
        assert acceleration.llm is engine, "which follows writes itself"
        with accelerate(model, runner="lean-stock"):
            assert model.generate(**batch(), max_new_tokens=12).tolist() == changed.tolist()
        model.to(torch.float32)
        smaller = model.generate(**batch(), max_new_tokens=12)
        assert acceleration.llm is not engine
    assert first.tolist() != changed.tolist()
    assert smaller.tolist() == model.generate(**batch(), max_new_tokens=12).tolist()
    model.to(torch.float64)


def test_the_model_stays_as_it_was(model: Any) -> None:
    original, keys, attributes = model.generate, list(model.state_dict()), set(vars(model))
    pointers = [each.data_ptr() for each in model.parameters()]
    acceleration = accelerate(model)
    assert model.generate.__doc__ == original.__doc__
    expected = model.generate(**batch(), max_new_tokens=5).tolist()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies.append(torch.load(buffer, weights_only=False))
    for each in copies:
        assert each.generate.__self__ is each
        assert each.generate.__func__ is original.__func__
        assert each.generate(**batch(), max_new_tokens=5).tolist() == expected
    assert (list(model.state_dict()), [each.data_ptr() for each in model.parameters()]) == (keys, pointers)
    again = accelerate(model)  # takes the place of the first
    assert model.generate(**batch(), max_new_tokens=5).tolist() == expected
    again.release()
    acceleration.release()
    release(model)
    assert model.generate == original
    assert set(vars(model)) == attributes


def test_what_is_no_model_or_no_drafter_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="Expected a transformers causal LM"):
        accelerate("models/tinycode")
    with pytest.raises(ConfigError, match="accelerate keeps the output of generate"):
        accelerate(model, {"method": "ngram", "acceptance": "synthetic", "synthetic_acceptance_length": 2})
    with pytest.raises(ConfigError, match=r"drafter is 7\. Expected a speculative_config"):
        accelerate(model, 7)
    with pytest.raises(ConfigError, match=f"and the model {VOCAB_SIZE}"):
        accelerate(model, tiny_model("llama", vocab_size=40))
    assert "generate" not in vars(model)


def test_bundled_model_with_a_draft_model_and_streamers(capsys: pytest.CaptureFixture[str]) -> None:
    """As in transformers' documentation: a batch, a printing streamer, one that another thread reads, a pipeline."""
    names = AutoTokenizer.from_pretrained("models/tinycode", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained("models/tinycode", dtype="float32")
    inputs = names(["def read_config(path):\n", "class Queue:"], return_tensors="pt", padding=True)
    single = names("for index in range(", return_tensors="pt")
    texts: list[Any] = []
    draft = "models/tinycode-draft"
    for accelerated in (False, True):
        if accelerated:
            acceleration = foretoken.hf.accelerate(model, f"{draft}:num_speculative_tokens=4", tokenizer=names)
        ids = model.generate(**inputs, max_new_tokens=40)
        model.generate(**single, streamer=TextStreamer(names), max_new_tokens=24)
        streamer = TextIteratorStreamer(names, skip_prompt=True)
        thread = Thread(target=model.generate, kwargs=dict(single, streamer=streamer, max_new_tokens=24))
        thread.start()
        pieces = list(streamer)
        thread.join()
        write = pipeline("text-generation", model=model, tokenizer=names)
        written = write("class Queue:", max_new_tokens=24, do_sample=False)[0]["generated_text"]
        texts.append((names.batch_decode(ids), pieces, written, capsys.readouterr().out))
    assert texts[0] == texts[1]
    accepted = {each.name: each for each in acceleration.llm.get_metrics()}["vllm:spec_decode_num_accepted_tokens"]
    assert accepted.value > 20
    acceleration.release()


@pytest.mark.parametrize("drafter", ["ngram:prompt_lookup_min=1", "FILE"])
def test_models_that_transformers_reads_from_gguf_files(drafter: str, tmp_path: Path) -> None:
    path = tiny_file(tmp_path / "model.gguf", matrices=Type.Q8_0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    model.generation_config = GenerationConfig(max_new_tokens=24, pad_token_id=PAD)
    expected = model.generate(**batch())
    acceleration = accelerate(model, f"{drafter.replace('FILE', str(path))}:num_speculative_tokens=4")
    assert torch.equal(model.generate(**batch()), expected)
    metrics = {each.name: each for each in acceleration.llm.get_metrics()}
    assert metrics["vllm:spec_decode_num_drafts"].value > 0
    acceleration.release()


def test_the_handle_tells_what_the_last_call_achieved(model: Any) -> None:
    inputs = {"input_ids": torch.tensor([ROWS[0]]), "attention_mask": torch.ones(1, 8, dtype=torch.int64)}
    with accelerate(model, {"method": "ngram", "num_speculative_tokens": 3}, tokenizer=tokenizer()) as handle:
        assert handle.last is None
        assert repr(handle) == "<Acceleration of LlamaForCausalLM with ngram; last call: none yet>"
        before = {each.name: each for each in handle.llm.get_metrics()}
        output = model.generate(**inputs, max_new_tokens=40, eos_token_id=None)
        first = handle.last
        assert first is not None
        assert first.num_emitted == 40 == output.shape[1] - 8
        counted = {each.name: each for each in handle.llm.get_metrics()}
        for name, count in (("num_draft_tokens", first.num_drafted), ("num_accepted_tokens", first.num_accepted)):
            metric = f"vllm:spec_decode_{name}"
            assert count == counted[metric].value - before[metric].value > 0  # type: ignore[union-attr]
        assert first.mean_acceptance_length == 39 / first.steps > 1
        assert first.tokens_per_second == 39 / first.seconds.total
        assert first.speedup is None, "what is drafted is fixed, so that plain decoding is never measured"
        words = f"{first.mean_acceptance_length:.2f} tokens a pass, {first.num_accepted} of {first.num_drafted} drafted"
        assert words in repr(handle)
        assert repr(handle).endswith("plain decoding not measured>")
        model.generate(**batch(), max_new_tokens=6, eos_token_id=None)
        assert handle.last is not None
        assert handle.last.num_emitted == 18, "all rows of the last call, and none of the one before"
        model.generate(**inputs, max_new_tokens=30, stopping_criteria=StoppingCriteriaList([EveryCall(output[0, 10])]))
        assert 0 < handle.last.num_emitted < 30, "a call that ends early"


def test_the_handle_tells_a_speed_up_where_plain_decoding_was_measured(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that follows the clock makes passes without drafts, and holds the others against them."""
    plain = {1: 0.5, 3: 1.0}
    with accelerate(model, tokenizer=tokenizer()) as handle:
        monkeypatch.setattr(Goodput, "plain_seconds", lambda self, batch_size: plain.get(batch_size))
        model.generate(input_ids=torch.tensor([ROWS[1]]), max_new_tokens=20, eos_token_id=None)
        last = handle.last
        assert last is not None
        assert last.compared_seconds == pytest.approx(last.seconds.total)
        assert last.plain_seconds == 19 * 0.5
        assert last.speedup == pytest.approx(9.5 / last.seconds.total)
        assert f"{last.speedup:.2f}x plain decoding>" in repr(handle)


class Shift(torch.nn.Module):
    """Another part, which is the same for every token."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).roll(3, dims=-1)  # type: ignore[no-any-return]


def replace_forward(model: Any) -> None:
    norm = model.model.layers[0].post_attention_layernorm
    norm.forward = lambda x: type(norm).forward(norm, x).flip(-1)


def replace_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()


def replace_layer(model: Any) -> None:
    layer = copy.deepcopy(model.model.layers[2])
    model.model.layers[0], layer.self_attn.layer_idx, layer.self_attn.config = layer, 0, model.config


CHANGES: dict[str, Callable[[Any], Any]] = {
    "set_epsilon": lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 0.4),
    "add_hook": lambda model: model.model.layers[0].register_forward_hook(lambda *event: event[-1] * -1.5),
    "add_pre_hook": lambda model: model.model.norm.register_forward_pre_hook(
        lambda module, args: (args[0].roll(1, dims=-1),)
    ),
    "add_projection_hook": lambda model: model.model.layers[2].mlp.up_proj.register_forward_hook(
        lambda *event: event[-1] * 3
    ),
    "replace_forward": replace_forward,
    "replace_norm": lambda model: setattr(
        model.model.layers[0], "input_layernorm", Shift(model.model.layers[0].input_layernorm)
    ),
    "replace_activation": replace_activation,
    "replace_layer": replace_layer,
    "replace_weight": lambda model: setattr(
        model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    ),
    "write_buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(0.2),
    "replace_buffer": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 0.2),
    "replace_data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.flip(0)),
    "assign_state": lambda model: model.load_state_dict(
        {key: value * -0.7 for key, value in model.state_dict().items()}, assign=True
    ),
}
BY_TRANSFORMERS = {
    "add_hook": "model.layers.0 has a forward hook",
    "add_pre_hook": "model.norm has a forward hook",
    "add_projection_hook": "model.layers.2.mlp.up_proj has a forward hook",
    "replace_forward": "model.layers.0.post_attention_layernorm has another forward than its class",
}


@pytest.mark.parametrize(("name", "runner"), slow_products(list(CHANGES), ["auto", "generic"], each=1))
def test_changes_of_the_model_take_effect(name: str, runner: str, model: Any, log: pytest.LogCaptureFixture) -> None:
    with accelerate(model, runner=runner):
        before = model.generate(**batch(), max_new_tokens=24)
        CHANGES[name](model)
        changed = [model.generate(**batch(), max_new_tokens=24).tolist() for _ in range(2)]
    own = model.generate(**batch(), max_new_tokens=24).tolist()
    assert before.tolist() != own
    assert changed == [own] * 2
    with accelerate(model, runner=runner):  # of a model that is like that from the start
        assert model.generate(**batch(), max_new_tokens=24).tolist() == own
    told = [each.getMessage() for each in log.records if "served by transformers" in each.getMessage()]
    assert len(told) == 2 * (name in BY_TRANSFORMERS), "once an acceleration"
    assert all(BY_TRANSFORMERS[name] in each for each in told)


def test_adapters_are_followed(model: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.inject_adapter_in_model(config, model)

    def texts() -> list[list[int]]:
        ours = adapted.generate(**batch(), max_new_tokens=12)
        accelerated = vars(adapted)["generate"]
        assert ours.tolist() == accelerated.original(**batch(), max_new_tokens=12).tolist()
        return ours.tolist()  # type: ignore[no-any-return]

    with accelerate(adapted):
        first, layers = texts(), [each for each in adapted.modules() if isinstance(each, peft.tuners.lora.LoraLayer)]
        with peft.helpers.rescale_adapter_scale(adapted, 9.0):
            assert texts() != first
        assert texts() == first
        for each in layers:
            each.enable_adapters(False)
        assert texts() != first


def test_hooks_that_are_removed_count_no_more(model: Any, log: pytest.LogCaptureFixture) -> None:
    with accelerate(model) as acceleration:
        engine = acceleration.llm
        own = model.generate(**batch(), max_new_tokens=12).tolist()
        handle = model.model.layers[0].register_forward_hook(lambda module, args, output: output * -1.5)
        assert model.generate(**batch(), max_new_tokens=12).tolist() != own
        handle.remove()
        assert model.generate(**batch(), max_new_tokens=12).tolist() == own
        assert acceleration.llm is engine
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *event: None)
        try:
            assert model.generate(**batch(), max_new_tokens=12).tolist() == own
        finally:
            handle.remove()
    assert "torch calls a forward hook on every module" in log.text


def test_a_model_that_became_unusable_is_left_to_transformers(model: Any, log: pytest.LogCaptureFixture) -> None:
    """A part that looks at other tokens of the sequence cannot be run on trees; the proof at load sees it."""

    class Mean(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - 0.5 * x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    with accelerate(model):
        model.model.layers[1].input_layernorm = Mean()
        ours = model.generate(**batch(ROWS[:1]), max_new_tokens=12, use_cache=False).tolist()
    assert ours == model.generate(**batch(ROWS[:1]), max_new_tokens=12, use_cache=False).tolist()
    assert "generate() is served by transformers, without speculation: " in log.text


MASKS = [[1, 1, -1, 1, 1], [2, 2, 2, 2, 2], [-1, 0, 1, 1, 1], [0.5, 0.5, 1, 1, 1], [0.0, 0.0, 1.0, 1.0, 1.0], [1.5] * 5]


@pytest.mark.parametrize(("mask", "architecture"), slow_products(MASKS, ["llama", "qwen2"], each=1))
def test_values_of_attention_masks(mask: list[float], architecture: str) -> None:
    """transformers counts positions by them; whatever is not 0 is seen."""
    model = tiny_model(architecture, dtype=torch.float64)
    model.generation_config.pad_token_id = PAD
    ids, values = torch.tensor([[5, 9, 3, 5, 9]]), torch.tensor([mask])
    for each in (values, values.bool(), values.to(torch.int8), values.to(torch.float64)):
        own, ours = both(model, inputs={"input_ids": ids, "attention_mask": each}, max_new_tokens=12)
        assert ours.tolist() == own.tolist()


def test_accelerations_may_be_nested(model: Any) -> None:
    original, own = model.generate, model.generate(**batch(), max_new_tokens=12).tolist()

    def served() -> str | None:
        assert model.generate(**batch(), max_new_tokens=12).tolist() == own
        return getattr(vars(model).get("generate"), "engine", None)

    with accelerate(model) as outer:
        assert served() is outer
        with accelerate(model, "suffix") as inner:
            assert served() is inner
            assert inner.last is not None
            with pytest.raises(ConfigError), accelerate(model, 7):
                pass
            assert served() is inner
        assert served() is outer
        assert outer.last is not None
        late = accelerate(model)
        outer.release()  # not in the order in which they began
        assert served() is late
        late.release()
        assert served() is None
    with accelerate(model), accelerate(model):
        release(model)  # all of them
        assert model.generate == original
    assert model.generate == original
    assert "generate" not in vars(model)

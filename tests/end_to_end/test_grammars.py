"""Requests with a grammar: the text with speculation is the text without it, has its form, and is drawn rightly.

Forms come over the bundled model, whose tokens hold several characters and whose heads are trained; the exact
distribution over a tiny random one. Slow because it writes hundreds of texts, and a distribution takes thousands.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from chi_square import chi_square_level
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_llms import PIECES, draft_model, tokenizer
from tiny_models import EOS_ID, tiny_model

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.errors import RequestError
from foretoken.core.records import StepRecord
from foretoken.engine.loop import Engine
from foretoken.grammars import drafts as grammar_drafts
from foretoken.trees.merge import compacted

MODELS = Path(__file__).parents[2] / "models"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
REGEX = r"(def|class) [a-z_]{3,8}\(self\):\n    return [0-9]{1,3}"
CHOICES = ["return None", "raise ValueError('é')", 'print("x")\n']
LARK = 'start: expr\nexpr: NUM (("+"|"*") NUM)*\nNUM: /[0-9]{1,2}/'
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "json without white space": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True},
    "regex": {"regex": REGEX},
    "choice": {"choice": CHOICES},
    "lark": {"grammar": LARK},
    "thoughts": {"regex": "[a-z]{3}", "reasoning": ["", "\n"]},
    "perhaps thoughts": {"json": SCHEMA, "reasoning": ["return", ":"]},
}
PROCESSED = {
    "plain": {},
    "bias": {"logit_bias": {5: 3.0}, "repetition_penalty": 1.2, "top_k": 40},
    "words": {"bad_words": ["None", "0"], "min_tokens": 6, "top_p": 0.9, "ignore_eos": True},
}
DRAFTERS: dict[str, Any] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "ngram tree": {"method": "ngram", "tree": "tree", "num_speculative_tokens": 16, "prompt_lookup_min": 1},
    "medusa": {"method": "medusa", "model": str(MODELS / "tinycode-medusa"), "num_speculative_tokens": 3},
    "hydra": {"method": "hydra", "model": str(MODELS / "tinycode-hydra"), "num_speculative_tokens": 3},
    "lookahead": {"method": "lookahead", "num_speculative_tokens": 4, "lookahead_window": 4},
    "noise": {"method": "drafters.adversarial", "behaviour": "random", "num_speculative_tokens": 4},
    "several": {"drafters": [{"method": "ngram", "tree": "tree"}, {"method": "suffix"}]},
}
ALIKE = {"ngram", "hydra"}  # a lookup, as among the several, and heads that draft as others do under a grammar


def requests(temperature: float) -> list[SamplingParams]:
    """Every form with some parameters, and two requests without a form."""
    sampled = {"temperature": temperature, "seed": 5, "max_tokens": 30}
    forms = [
        SamplingParams(**sampled, **keys, structured_outputs=form) for form in FORMS.values()
        for keys in PROCESSED.values()
    ]  # fmt: skip
    return [*forms, SamplingParams(**sampled), SamplingParams(**sampled, **PROCESSED["bias"])]


def generated(drafter: Any, params: list[SamplingParams], slots: int = 6, **more: Any) -> list[RequestOutput]:
    llm = LLM(MODELS / "tinycode", speculative_config=drafter, max_num_seqs=slots, max_model_len=96, **more)
    prompts = [f"def area_{index}(self):\n    " for index in range(len(params))]
    return llm.generate(prompts, params)


@cache
def plain(temperature: float) -> list[RequestOutput]:
    """One request at a time, a token a pass."""
    with mock.patch.object(grammar_drafts, "_MOST_FORCED", 0):
        outputs = generated(None, requests(temperature), slots=1)
    assert all(output.metrics.num_accepted == 0 for output in outputs)
    return outputs


@pytest.mark.parametrize(
    ("drafter", "temperature"),
    [
        pytest.param(
            drafter, (0.0, 0.8)[(place + turn) % 2], marks=pytest.mark.slow if turn or drafter in ALIKE else []
        )
        for place, drafter in enumerate(DRAFTERS) for turn in range(2)
    ],
)  # fmt: skip
def test_text_is_plain_decodings(drafter: str, temperature: float) -> None:
    """In batches with requests that have no form, of which the decoder itself chooses the tokens."""
    params, known = requests(temperature), plain(temperature)
    records: list[StepRecord] = []
    got = generated(DRAFTERS[drafter], params, on_step=records.append, trace=drafter == "ngram tree")
    assert_same_text(got, known, [str(each.structured_outputs) for each in params])
    assert all(output.metrics.draft_errors == 0 for output in got)
    accepted = sum((Counter(step.accepted_by) for record in records for step in record.sequences), Counter[str]())
    assert accepted["grammar"] > 20, "forced tokens are drafted and accepted"
    assert all(output.metrics.accepted_by["grammar"] == 0 for output in got[-2:]), "without a form nothing is forced"
    drafted = sum((Counter(step.drafted_by) for record in records for step in record.sequences), Counter[str]())
    assert drafted["grammar"] >= accepted["grammar"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_have_their_form(temperature: float) -> None:
    params, outputs = requests(temperature), plain(temperature)
    checks = {"json": 0, "regex": 0, "choice": 0, "grammar": 0}
    for each, output in zip(params, outputs, strict=True):
        form, completion = each.structured_outputs, output.outputs[0]
        if form is None or completion.finish_reason != "stop":
            assert completion.finish_reason in ("length", "stop", "error" if each.bad_words else "length")
            continue
        text = completion.text
        if form.reasoning is not None and text.startswith(form.reasoning[0]):
            text = text.partition(form.reasoning[1])[2].lstrip(" \n")
        if form.json is not None:
            value = json.loads(text)
            assert list(value) == ["name", "tags"]
            assert len(value["name"]) <= 8
            assert set(value["tags"]) <= {"a", "b"}
        assert form.regex is None or re.fullmatch(form.regex, text)
        assert form.choice is None or text in form.choice
        assert form.grammar is None or re.fullmatch(r"[0-9]{1,2}([+*][0-9]{1,2})*", text)
        checks[next(kind for kind in checks if getattr(form, kind) is not None)] += 1
        assert EOS_ID not in output.outputs[0].token_ids or not each.ignore_eos
    assert all(count > 0 for kind, count in checks.items() if kind != "grammar")


def test_all_completions_of_a_request_have_the_form() -> None:
    params = SamplingParams(n=5, temperature=1.5, structured_outputs={"choice": CHOICES}, max_tokens=30)
    (output,) = generated(DRAFTERS["ngram tree"], [params])
    assert all(completion.text in CHOICES for completion in output.outputs)
    assert all(completion.finish_reason == "stop" for completion in output.outputs)


def test_bad_forms_are_refused_before_anything_is_generated() -> None:
    records: list[StepRecord] = []
    params = [SamplingParams(), SamplingParams(structured_outputs={"regex": "(a"})]
    with pytest.raises(RequestError, match="regex of structured_outputs does not compile"):
        generated(None, params, on_step=records.append)
    assert not records


def test_a_form_that_grows_too_large_ends_its_request_alone() -> None:
    sampled = {"temperature": 0.0, "max_tokens": 8}
    params = [
        SamplingParams(**sampled, structured_outputs={"regex": "((a{100}){100}){100}b"}),
        SamplingParams(**sampled, structured_outputs={"regex": "[ab]{4}"}),
    ]
    for drafter in ("none", "ngram"):
        large, other = (output.outputs[0] for output in generated(DRAFTERS[drafter], params))
        assert large.finish_reason == "error"
        assert "too many expressions" in str(large.error)
        assert re.fullmatch("[ab]{4}", other.text)


# The distribution: all texts of this language are written out, in all ways to split them.
PATTERN, PROMPT, TEMPERATURE = "[abt](h|e|he)?|k", (5, 6, 7), 1.5
SHORT_PROMPT = (7,)  # all of its output is drafted: of other prompts the first token comes of the pass that reads them
LANGUAGE = {first + rest for first in "abt" for rest in ("", "h", "e", "he")} | {"k"}
SAMPLES, COPIES, LEVEL = 3_000, 100, 1e-6
SHAPES: dict[str, dict[str, Any]] = {
    "block": {"num_speculative_tokens": 2},
    "sequential": {"tree": {"widths": [2, 2]}},
    "traversal": {"tree": {"widths": [2, 2]}},
    "coupled": {"tree": {"widths": [2, 2]}},
}


@cache
def small(seed: int) -> Any:
    """One layer, flat enough that all texts come up."""
    return tiny_model("llama", seed=seed, dtype=torch.float64, num_hidden_layers=1, initializer_range=0.15)


@cache
def exact_distribution(prompt: tuple[int, ...] = PROMPT) -> Mapping[tuple[int, ...], float]:
    """Of token sequences, the end-of-sequence token included where it is generated, by plain forwards."""
    pieces = {
        token: piece.decode(errors="ignore") for token, piece in enumerate(PIECES) if not isinstance(piece, str)
    }  # fmt: skip
    found: dict[tuple[int, ...], float] = {}
    todo: list[tuple[tuple[int, ...], str, float]] = [((), "", 1.0)]
    while todo:
        tokens, text, prob = todo.pop()
        allowed = [
            token for token, piece in pieces.items()
            if piece and any(whole.startswith(text + piece) for whole in LANGUAGE)
        ]  # fmt: skip
        if not allowed:
            found[tokens] = prob
            continue
        if text in LANGUAGE:
            allowed.append(EOS_ID)
        with torch.inference_mode():
            logits = small(0)(torch.tensor([[*prompt, *tokens]])).logits[0, -1, allowed] / TEMPERATURE
        for token, share in zip(allowed, logits.softmax(0).tolist(), strict=True):
            if token == EOS_ID:
                found[*tokens, token] = prob * share
            else:
                todo.append(((*tokens, token), text + pieces[token], prob * share))
    return found


def sampled_texts(
    rule: str, monkeypatch: pytest.MonkeyPatch, prompt: tuple[int, ...] = PROMPT
) -> tuple[Counter[tuple[int, ...]], float]:
    """Texts of the engine under a rule, and accepted tokens of the draft model a generated one."""
    original = Engine.__init__

    def with_rule(self: Engine, *args: Any, policy: Any, **more: Any) -> None:
        original(self, *args, policy=type(policy)(rule=rule), **more)

    monkeypatch.setattr(Engine, "__init__", with_rule)
    llm = LLM(
        small(0), tokenizer=tokenizer(), drafter=draft_model(small(1), **SHAPES[rule]), trust_drafter=True,
        max_num_seqs=200, max_model_len=16,
    )  # fmt: skip
    params = [
        SamplingParams(
            temperature=TEMPERATURE, n=COPIES, seed=seed, max_tokens=8, structured_outputs={"regex": PATTERN}
        )
        for seed in range(SAMPLES // COPIES)
    ]  # fmt: skip
    outputs = llm.generate([list(prompt)] * len(params), params)
    texts = Counter(tuple(each.token_ids) for output in outputs for each in output.outputs)
    accepted = sum(output.metrics.accepted_by["draft_model"] for output in outputs)
    return texts, accepted / sum(output.metrics.num_emitted for output in outputs)


@pytest.mark.parametrize(
    ("rule", "prompt"),
    [
        ("block", PROMPT), ("sequential", SHORT_PROMPT), ("traversal", SHORT_PROMPT),
        *(pytest.param(rule, PROMPT, marks=pytest.mark.slow) for rule in SHAPES if rule != "block"),
        *(pytest.param(rule, SHORT_PROMPT, marks=pytest.mark.slow) for rule in ("block", "coupled")),
    ],
    ids=str,
)  # fmt: skip
def test_distribution_is_the_targets_under_the_grammar(
    rule: str, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = exact_distribution(prompt)
    assert sum(distribution.values()) == pytest.approx(1.0)
    assert len(distribution) == 18
    texts, accepted = sampled_texts(rule, monkeypatch, prompt)
    assert sum(texts.values()) == SAMPLES
    assert chi_square_level(texts, distribution) > LEVEL
    assert accepted > 0.01, "drafts under the grammar are accepted"


def test_pruned_draws_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving out drawn tokens that the grammar forbids keeps every text in form, and has the wrong distribution."""

    def all_left_out(tree: Any, kept: torch.Tensor) -> Any:
        for _ in range(tree.max_depth):
            kept = kept & (kept.gather(1, tree.parents.clamp_min(0)) | (tree.depths == 0))
        is_node = torch.arange(tree.width) < tree.num_nodes.unsqueeze(1)
        return compacted(tree, kept & is_node)

    monkeypatch.setattr(grammar_drafts, "prune", all_left_out)
    texts, _ = sampled_texts("sequential", monkeypatch, SHORT_PROMPT)
    assert chi_square_level(texts, exact_distribution(SHORT_PROMPT)) < LEVEL

"""`speculative_config`: vLLM's keys work or are refused with a sentence; nothing is ignored in silence."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters.autoregressive_heads import directory
from end_to_end.tiny_llms import llm, noisy, target, tokenizer
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.acceptance.select import AcceptancePolicy
from foretoken.core.errors import ConfigError
from foretoken.drafters import registry
from foretoken.drafters.draft_model import DraftModelDrafter
from foretoken.entrypoints.config import ENGINE_KEYS, parse_speculative_config
from foretoken.trees.stopping import StopRule, acceptance_network, write_rule

# What vLLM 0.33 calls the keys, with values that ask for nothing foretoken lacks.
NEUTRAL_KEYS = {
    "draft_tensor_parallel_size": [None, 1],
    "max_model_len": [None],
    "code_revision": [None],
    "parallel_drafting": [None, False],
    "enable_adaptive_verification": [None, False, True],
    "enforce_eager": [None, False, True],
    "disable_padded_drafter_batch": [None, False, True],
}


def parse(**config: Any) -> Any:
    """A checked configuration for a target that stands alone."""
    return parse_speculative_config(config, target="/nowhere/target")


def test_a_head_beside_the_target_goes_by_its_name(tmp_path: Path) -> None:
    """`TARGET-hass` holds a head of another method than its name; what lies there and holds none is no drafter."""
    place = directory("eagle")
    (tmp_path / "target-hass").symlink_to(place)
    (tmp_path / "target-notes").mkdir()
    found = parse_speculative_config({"method": "hass", "tree": "chain"}, target=str(tmp_path / "target")).options[0]
    assert (found.method, found.model, found.tree) == ("eagle", str(tmp_path / "target-hass"), "chain")
    named = parse_speculative_config({"method": "eagle", "model": "/x"}, target=str(tmp_path / "target")).options[0]
    assert (named.method, named.model) == ("eagle", "/x")
    for method in ("notes", "nothing", "../target-hass", "x/../hass"):
        with pytest.raises(ConfigError, match="does not exist"):
            parse_speculative_config({"method": method}, target=str(tmp_path / "target"))
    with pytest.raises(ConfigError, match=r"its heads are those of 'eagle'\. Set 'method' to 'eagle' and 'model' to"):
        parse(method="HASS")


@pytest.mark.parametrize("key", NEUTRAL_KEYS)
def test_keys_of_vllm_that_ask_for_nothing_are_accepted(key: str) -> None:
    for value in NEUTRAL_KEYS[key]:
        parse(method="ngram", **{key: value})
    with pytest.raises(ConfigError, match=f"'{key}' = 'something' is not supported. Leave it out."):
        parse(method="ngram", **{key: "something"})


def test_who_decides_how_much_is_drafted() -> None:
    assert parse(method="ngram").control == "goodput"
    assert parse(method="ngram", control="smartspec", num_speculative_tokens_per_batch_size=None).control == "smartspec"
    table = parse(drafters=["ngram"], num_speculative_tokens_per_batch_size=[[1, 64, 3], [65, 128, 0]]).control
    assert table == ((1, 64, 3), (65, 128, 0))
    with pytest.raises(ConfigError, match=r"there is no control 'smartspecs'\. Did you mean 'smartspec'"):
        parse(method="ngram", control="smartspecs")
    with pytest.raises(ConfigError, match=r"there is no control 3\. Known: confidence, disco, fixed"):
        parse(method="ngram", control=3)
    with pytest.raises(ConfigError, match="'control' stands beside"):
        parse(method="ngram", control="fixed", num_speculative_tokens_per_batch_size=[[1, 2, 3]])


def test_stop_rules(tmp_path: Path) -> None:
    chain = parse(method="draft_model", model="/x", control="confidence").options[0]
    assert (chain.tree, chain.stop, chain.is_adaptive) == ("chain", StopRule.of("confidence", 0.4), True)
    assert parse(method="early_exit", control="confidence", confidence_threshold=1).options[0].stop == StopRule.of(
        "confidence", 1.0
    )
    write_rule(StopRule.of("disco", 0.25, acceptance_network("disco"), 7), tmp_path, "disco")
    found = parse(method="draft_model", model=str(tmp_path), control="disco", num_speculative_tokens=3)
    assert found.options[0].num_speculative_tokens == 3
    found = parse(method="draft_model", model=str(tmp_path), control="disco")
    assert found.options[0].num_speculative_tokens == 7
    assert found.options[0].stop.thresholds.token_probability == 0.25


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "ngram", "control": "confidence"}, "a stop rule, which method 'ngram' cannot follow. Expected a"),
        ({"method": "draft_model", "model": "/x", "control": "confidence", "tree": "dynamic"}, "which dynamic trees"),
        (
            {"method": "draft_model", "model": "/x", "control": "confidence", "pruning": {"path_probability": 0.1}},
            "'pruning' stands beside a 'control' that is a stop rule. Expected one of them.",
        ),
        (
            {"method": "draft_model", "model": "/x", "control": "confidence", "vocab_match": "text"},
            "drafts are not stopped by a rule. Leave 'control' out",
        ),
        ({"method": "ngram", "confidence_threshold": 0.4}, "'confidence_threshold' needs 'control': 'confidence'"),
        (
            {"method": "early_exit", "control": "confidence", "confidence_threshold": 0},
            "'confidence_threshold' is 0. Expected above 0 and at most 1.",
        ),
        ({"method": "ngram", "control": "disco"}, "is kept with a drafter's weights, and method 'ngram' has none."),
        (
            {"method": "draft_model", "model": "/x", "control": "disco"},
            "there is no '/x/control/disco.safetensors'. Train it: foretoken tune stop /nowhere/target -s "
            "draft_model:model=/x",
        ),
    ],
)
def test_stop_rules_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(**config)


@pytest.mark.parametrize(
    "table",
    [
        [], "x", 3, [[1, 2]], [[1, 2, 3.0]], [[2, 1, 3]], [[1, 4, 3], [4, 8, 1]], [[0, 4, 3]], [[1, 4, 65]],
        [[1, 4, -1]],
    ],
)  # fmt: skip
def test_tables_that_are_none(table: object) -> None:
    with pytest.raises(ConfigError, match=r"Expected \[least, most, tokens\] for rising numbers of sequences"):
        parse(method="ngram", num_speculative_tokens_per_batch_size=table)


@pytest.mark.parametrize(("key", "value", "unset"), [("revision", "v1", None), ("quantization", "int8", "auto")])
def test_keys_of_methods_with_weights(key: str, value: str, unset: str | None) -> None:
    """vLLM gives them to all methods, as None where it asks for nothing."""
    assert parse(method="ngram", **{key: None}).options[0].method == "ngram"
    for method in ("draft_model", "medusa", "hydra", "mlp_speculator"):
        for given, expected in ((None, unset), (value, value)):
            assert getattr(parse(method=method, model="/x", **{key: given}).options[0], key) == expected


def test_other_vocabularies_are_for_draft_models() -> None:
    """vLLM's key is one name of an option; all methods take the values that ask for nothing."""
    for value in (None, False):
        assert parse(method="ngram", use_heterogeneous_vocab=value).options[0].method == "ngram"
        assert parse(method="draft_model", model="/x", use_heterogeneous_vocab=value).options[0].matching == "same"
    assert parse(model="/x", use_heterogeneous_vocab=True).options[0].matching == "intersection"
    assert parse(model="/x", use_heterogeneous_vocab=True, vocab_match="auto").options[0].matching == "auto"
    assert parse(model="/x", vocab_match="text").options[0].matching == "text"
    with pytest.raises(ConfigError, match="method 'ngram' has no key 'use_heterogeneous_vocab'"):
        parse(method="ngram", use_heterogeneous_vocab=True)
    with pytest.raises(ConfigError, match="and vocab_match is 'same'"):
        parse(model="/x", use_heterogeneous_vocab=True, vocab_match="same")


WRONG_NUMBERS = (True, "3", 1.5, 3.0, float("nan"), [3], 10**30)
WRONG_NAMES = (True, 3, 1.5, ["x"])
OPTIONS = {
    "num_speculative_tokens": WRONG_NUMBERS,
    "tree_top_k": (*WRONG_NUMBERS, 0, 65),
    "max_nodes": (*WRONG_NUMBERS, None, 1, 513),
    "prompt_lookup_max": (*WRONG_NUMBERS, None),
    "prompt_lookup_min": (*WRONG_NUMBERS, None),
    "lookahead_window": (*WRONG_NUMBERS, None, 0, 257),
    "lookahead_ngram": (*WRONG_NUMBERS, None, 1, 33),
    "exit_layer": (*WRONG_NUMBERS, 0),
    "draft_window_size": (*WRONG_NUMBERS, 0),
    "draft_sink_size": (*WRONG_NUMBERS, None, -1, 1025),
    "draft_retrieval": (1, 0, "true", 1.0, None),
    "kv_selection": (*WRONG_NAMES, None, "Vegas"),
    "kv_budget": (*WRONG_NUMBERS, 1),
    "kv_ratio": (True, "3", float("nan"), [3], None, 0.0, 1.1),
    "kv_sinks": (*WRONG_NUMBERS, None, -1, 1025),
    "draft_with": (*WRONG_NAMES, ""),
    **dict.fromkeys(
        ("prediction_min_match", "prediction_max_match", "rest_min_match", "rest_max_match", "rest_max_matches"),
        (*WRONG_NUMBERS, None, 0),
    ),
    "datastore": WRONG_NAMES,
    "suffix_decoding_max_tree_depth": (*WRONG_NUMBERS, None, 1, 257),
    "suffix_decoding_max_cached_requests": (*WRONG_NUMBERS, None, -1),
    "suffix_decoding_max_cached_bytes": (*WRONG_NUMBERS, None, 0),
    "suffix_decoding_max_spec_factor": (True, "3", float("nan"), [3], 10**30, None, -1.0),
    "suffix_decoding_min_token_prob": (True, "3", float("nan"), [3], None, -0.1, 1.1),
    "lookahead_guesses": (*WRONG_NUMBERS, None, 0, 257),
    "lookahead_pool_from_prompt": (1, 0, "true", 1.0, None),
    "seed": (True, "3", 1.5, [3], None),
    "pattern": (True, "3", 1.5, [True], ["3"], [1.5], []),
    "references": (True, "3", [3], [[True]], [["3"]], [[1.5]]),
    "model": WRONG_NAMES,
    "revision": WRONG_NAMES,
    "draft_sample_method": (*WRONG_NAMES, None, "Greedy"),
    "quantization": (*WRONG_NAMES, "awq", "Int8"),
    "vocab_match": (*WRONG_NAMES, "tli", "Text"),
    "draft_vocab_size": (True, 1.5, "most", "8", None, [3], 0, -1),
    "draft_vocab": WRONG_NAMES,
    "use_heterogeneous_vocab": (1, 0, "true", 1.0),
    "behaviour": (*WRONG_NAMES, None, "polite"),
    "allow_other_target": (1, 0, "true", "yes", 1.0, None),
}


def test_every_option_of_every_method_has_exactly_its_type() -> None:
    """Nothing is taken for a number, a name or a truth that only looks like one."""
    from foretoken.drafters.registry import _module, known_methods

    required = {"oracle": {"references": [[1, 2]]}}
    for method in known_methods():
        fields = _module(method).Options.model_fields
        for key in fields.keys() - {"method", "tree", "pruning", "stop"}:
            for value in OPTIONS[key]:
                with pytest.raises(ConfigError, match=rf"'{key}[.\d]*' of method '{method}' is "):
                    parse(method=method, **{**required.get(method, {}), key: value})


def test_keys_of_vllm_that_ask_for_something() -> None:
    ngram = parse(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=6).options[0]
    assert (ngram.num_speculative_tokens, ngram.prompt_lookup_min, ngram.prompt_lookup_max) == (3, 1, 6)
    draft = parse(method="draft_model", model="/somewhere", draft_sample_method="greedy").options[0]
    assert (draft.model, draft.draft_sample_method) == ("/somewhere", "greedy")


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({}, "auto"),
        ({"rejection_sample_method": "standard"}, "sequential"),
        ({"rejection_sample_method": "block"}, "block"),
        ({"rejection_sample_method": "block", "acceptance": "sequential"}, "sequential"),
        ({"acceptance": "coupled"}, "coupled"),
        ({"acceptance": "lenient", "lenience": 0.5}, "lenient"),
        ({"acceptance": "typical", "posterior_threshold": 0.1, "posterior_alpha": 0.4}, "typical"),
        ({"acceptance": "typical", "typical_end": "argmax"}, "typical"),
        ({"acceptance": "typical", "typical_end": "draw"}, "typical"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.56]}, "synthetic"),
        ({"acceptance": "synthetic", "synthetic_acceptance_length": 2.5}, "synthetic"),
    ],
)
def test_acceptance_rules(keys: dict[str, Any], rule: str) -> None:
    policy = parse(method="ngram", **keys).policy
    assert policy.rule == rule
    assert policy.is_lossy == (rule in ("lenient", "typical", "synthetic"))
    keys_of_rules = ("lenience", "posterior_threshold", "posterior_alpha", "typical_end")
    for key in (*keys_of_rules, "synthetic_acceptance_rates", "synthetic_acceptance_length"):
        assert getattr(policy, key) == keys.get(key, getattr(AcceptancePolicy(), key))


@pytest.mark.parametrize("key", ["lenience", "posterior_threshold", "posterior_alpha"])
@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.5, float("nan"), True, "0.5", None, np.float32(2)], ids=repr)
def test_ranges_of_acceptance_options_are_those_of_the_policy(key: str, value: Any) -> None:
    """What a configuration refuses, the policy refuses with the same sentence, and the other way round."""
    with pytest.raises(ConfigError, match=f"'{key}' is") as by_config:
        parse(method="ngram", **{key: value})
    with pytest.raises(ConfigError) as by_policy:
        AcceptancePolicy(**{key: value})
    assert str(by_config.value) == str(by_policy.value)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, r"has no 'method'"),
        ({"method": "ngrams"}, r"method 'ngrams' does not exist. Did you mean 'ngram'\? Known: draft_model, "),
        ({"method": None}, r"has no 'method'"),
        ({"method": ["ngram"]}, r"does not exist"),
        ({"method": "ngram", "num_speculative_token": 3}, r"no key 'num_speculative_token'. Did you mean 'num_specul"),
        ({"method": "ngram", "acceptence": "block"}, r"no key 'acceptence'. Did you mean 'acceptance'\?"),
        ({"method": "draft_model", "prompt_lookup_max": 3}, r"method 'draft_model' has no key 'prompt_lookup_max'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, r"'num_speculative_tokens' of method 'ngram' is 0. Input"),
        ({"method": "ngram", "prompt_lookup_min": 9}, r"method 'ngram': prompt_lookup_min must not be abo"),
        (
            {"method": "ngram", "tree": "bush"},
            r"there is no tree 'bush'. Known: chain, dynamic, mc_sim_7b_63, tree, vicuna",
        ),
        (
            {"method": "ngram", "tree": "zephyr_stage1"},
            r"there is no tree 'zephyr_stage1'. Did you mean 'zephyr_stage2'",
        ),
        ({"method": "ngram", "tree": {"width": [2]}}, r"tree {'width': \[2\]} is not valid. Expected {'widths'"),
        ({"method": "ngram", "tree": [[0], [0]]}, r"tree choice \[0\] stands twice"),
        ({"method": "medusa", "tree": {"widths": [0]}}, r"tree widths \[0\] are not valid"),
        ({"method": "draft_model", "tree": [[True]]}, r"tree choice \[True\] is not valid"),
        ({"method": "hydra", "tree": None}, r"tree None is not valid"),
        ({"method": "draft_model", "draft_sample_method": "x"}, r"'draft_sample_method' .* is 'x'. .*'probabilistic'"),
        ({"method": "oracle"}, r"'references' of method 'oracle' is missing. Expected a value."),
        ({"method": "ngram", "acceptance": "blok"}, r"acceptance rule 'blok' does not exist. Did you mean 'block'\?"),
        ({"method": "ngram", "acceptance": "greedy"}, r"acceptance rule 'greedy' does not exist"),
        ({"method": "ngram", "rejection_sample_method": "fly"}, r"rejection_sample_method 'fly' is not supported. "),
        ({"method": "ngram", "rejection_sample_method": "synthetic"}, r"'synthetic' needs either synthetic_acceptance"),
        (
            {"method": "ngram", "rejection_sample_method": "synthetic", "acceptance": "coupled"},
            r"rejection_sample_method 'synthetic' is lossy, and acceptance is 'coupled'. Pass one of them.",
        ),
        (
            {"method": "ngram", "rejection_sample_method": "block", "synthetic_acceptance_length": 2},
            r"synthetic acceptance came with the acceptance rule 'block'. ",
        ),
        ({"method": "ngram", "lenience": 1.5}, r"'lenience' is 1.5. Expected above 0 and at most 1."),
        ({"method": "ngram", "posterior_alpha": "big"}, r"'posterior_alpha' is 'big'. Expected a number"),
        ({"method": "ngram", "lenience": True}, r"'lenience' is True. Expected a number"),
        ({"method": "ngram", "posterior_alpha": float("nan")}, r"'posterior_alpha' is nan. Expected above 0"),
        ({"method": "ngram", "typical_end": "sample"}, r"'typical_end' is 'sample'. Expected 'draw' or 'argmax'."),
        ({"method": "ngram", "typical_end": ["draw"]}, r"'typical_end' is \['draw'\]. Expected 'draw' or 'argmax'."),
        ({"method": "ngram", "revision": "main"}, r"method 'ngram' has no key 'revision'"),
        ({"method": "ngram", "quantization": "int8"}, r"method 'ngram' has no key 'quantization'"),
        ({"method": "draft_model"}, r"needs a draft model"),
    ],
)
def test_mistakes_come_back_as_a_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        llm({"speculative_config": config})


def assert_short_line(message: str) -> None:
    """One line that can be printed."""
    assert len(message.encode()) < 500
    assert "\n" not in message


class Unprintable:
    """An object whose text cannot be had."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


NONSENSE = (Unprintable(), [], {}, {"a": [1]}, [[1]], True, float("nan"), 10**6000, b"x", np.eye(2), torch.ones(2),
            "x" * 900, "a\nb", "\ud800")  # fmt: skip


@pytest.mark.parametrize("key", sorted(ENGINE_KEYS | set(registry.drafter_options({"method": "ngram"}).model_dump())))
def test_values_of_any_type_are_taken_or_refused_in_one_line(key: str) -> None:
    """Whatever its text is, how long it is, and whether it can be compared or counted up at all."""
    refused = 0
    for value in NONSENSE:
        try:
            parse(**{"method": "ngram", key: value})
            parse(**{key: value})
        except ConfigError as err:
            assert_short_line(str(err))
            refused += 1
    assert refused > len(NONSENSE) // 2


@pytest.mark.parametrize(
    "tree", [[[0] * 500], [[10**6000, 1]], [[-(10**6000)]], [[0], [0]], [[]], {"widths": [10**6000]}]
)
def test_trees_of_any_size_are_refused_in_one_line(tree: Any) -> None:
    with pytest.raises(ConfigError) as error:
        llm({"speculative_config": {"method": "oracle", "references": [[1]], "tree": tree}})
    assert_short_line(str(error.value))


@pytest.mark.parametrize("tree", [{"widths": [10**9]}, {"widths": [40, 40]}, {"widths": [3, 0]}, {"widths": [2] * 60}])
def test_widths_are_checked_before_any_node_is_made(tree: Any) -> None:
    """A billion nodes were listed first, and counted afterwards."""
    with pytest.raises(ConfigError, match=r"tree widths .* (give too many nodes|are not valid)\. Expected"):
        llm({"speculative_config": {"method": "oracle", "references": [[1]], "tree": tree}})


def test_the_same_as_json_text() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": "sequential"}
    assert parse_speculative_config(json.dumps(config), target="x") == parse(**config)


def test_a_method_that_is_not_named_is_told_from_the_files(tmp_path: Path) -> None:
    """As in vLLM: a model alone is a draft model, a head says what it is, prompt lookup has keys of its own."""
    tiny_model("llama").save_pretrained(tmp_path / "small")
    for method in ("medusa", "hydra", "mlp_speculator"):
        bundled = Path(__file__).parents[2] / f"models/tinycode-{method}"
        assert parse(model=str(bundled)).options[0].method == method
    assert parse(model=str(tmp_path / "small")).options[0].method == "draft_model"
    assert parse(method=None, model="owner/name").options[0].method == "draft_model"
    assert parse(prompt_lookup_max=4, num_speculative_tokens=3).options[0].method == "ngram"


def test_tree_choices_that_are_no_tree_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tree choice \[0, 0\] has no parent. Add \[0\]"):
        llm({"speculative_config": {"method": "oracle", "references": [[1]], "tree": [[0, 0]]}})


def test_a_drafter_beside_the_target_is_found(tmp_path: Path) -> None:
    """`TARGET-draft` for a draft model, `TARGET-METHOD` for the others, unless a model is named."""
    (tmp_path / "big-draft").mkdir()
    beside = parse_speculative_config({"method": "draft_model"}, target=str(tmp_path / "big"))
    assert beside.options[0].model == str(tmp_path / "big-draft")
    named = parse_speculative_config({"method": "draft_model", "model": "/x"}, target=str(tmp_path / "big"))
    assert named.options[0].model == "/x"
    assert parse_speculative_config({"method": "ngram"}, target=str(tmp_path / "big")).options[0].model is None


def test_names_of_methods_stand_for_configurations() -> None:
    """`"drafters": ["ngram", "eagle3"]`, also beside whole configurations."""
    named = parse(drafters=["ngram", {"method": "ngram", "tree": "tree"}])
    assert named == parse(drafters=[{"method": "ngram"}, {"method": "ngram", "tree": "tree"}])
    with pytest.raises(ConfigError, match=r"method 'ngrams' does not exist. Did you mean 'ngram'"):
        parse(drafters=["ngrams"])
    for wrong in ("ngram", [], ["ngram", 3], [["ngram"]], ["ngram"] * 17):
        with pytest.raises(ConfigError, match="Expected a list of 1 to 16 methods or configurations"):
            parse(drafters=wrong)


def test_drafter_and_config_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        llm({"speculative_config": {"method": "ngram"}, "drafter": lambda: None})


class TestDraftModelFromADirectory:
    """The whole way: two saved models, loaded by name."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        for name, module in (("big", target()), ("big-draft", noisy())):
            module.save_pretrained(tmp_path / name)
            tokenizer().save_pretrained(tmp_path / name)
        return tmp_path

    def test_it_drafts_without_changing_text(self, directory: Path) -> None:
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=30)
        plain = LLM(str(directory / "big"), dtype="float64").generate("abc the", params)[0]
        config = {"method": "draft_model", "num_speculative_tokens": 3}
        drafted = LLM(str(directory / "big"), dtype="float64", speculative_config=config).generate("abc the", params)[0]
        assert drafted.outputs[0] == plain.outputs[0]
        assert drafted.prompt == "abc the"
        assert drafted.metrics.mean_acceptance_length > 1.4
        assert drafted.metrics.accepted_by.keys() == {DraftModelDrafter.name}

    def test_another_vocabulary_is_refused(self, directory: Path) -> None:
        other = directory / "other"
        noisy().save_pretrained(other)
        renamed = tokenizer().backend_tokenizer.to_str().replace('"ing":', '"gni":')
        tokenizer().save_pretrained(other)
        (other / "tokenizer.json").write_text(renamed, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"has another vocabulary than .*: 2 entries differ"):
            LLM(str(directory / "big"), speculative_config={"method": "draft_model", "model": str(other)})

    def test_without_tokenizers_the_sizes_must_agree(self, directory: Path) -> None:
        small = directory / "small"
        tiny_model("llama", vocab_size=40).save_pretrained(small)
        with pytest.raises(ConfigError, match="has 40 tokens, the target 67"):
            LLM(target(), speculative_config={"method": "draft_model", "model": str(small)})

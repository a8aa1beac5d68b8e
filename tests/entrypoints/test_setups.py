"""The one syntax for drafters: one, several in one tree, a path, JSON; by the command line, `LLM` and `accelerate`."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from drafters.autoregressive_heads import directory, target
from end_to_end.tiny_llms import tokenizer
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.bench.compare import SetupEngines
from foretoken.bench.workload import Workload
from foretoken.core.errors import ConfigError
from foretoken.entrypoints.config import checked_setup, checked_setups, parse_setup, parse_speculative_config
from foretoken.formats import native
from foretoken.formats.registry import read_head
from foretoken.hf.acceleration import accelerate
from foretoken.models.loading import load_model

LOOKUP, HEAD = {"method": "ngram"}, {"method": "medusa", "tree": "chain"}
TARGET = Path(__file__).parents[2] / "models" / "tinycode"
DRAFT = TARGET.with_name("tinycode-draft")


@pytest.mark.parametrize(
    ("text", "name", "config"),
    [
        ("ngram", "ngram", LOOKUP),
        ("ngram+medusa:chain", "ngram+medusa:chain", {"drafters": [LOOKUP, HEAD]}),
        ("ngram:tree+ngram:prompt_lookup_max=2", "ngram:tree+ngram prompt_lookup_max=2",
         {"drafters": [{**LOOKUP, "tree": "tree"}, {**LOOKUP, "prompt_lookup_max": 2}]}),
        ('{"drafters": [{"method": "ngram"}, {"method": "a.b"}], "acceptance": "coupled"}', "ngram+a.b",
         {"drafters": [LOOKUP, {"method": "a.b"}], "acceptance": "coupled"}),
        ('{"drafters": ["ngram", {"method": "a.b"}]}', "ngram+a.b", {"drafters": ["ngram", {"method": "a.b"}]}),
        ("oracle:key=a+b", "oracle key=a+b", {"method": "oracle", "key": "a+b"}),
        ("hydra:dynamic:max_nodes=32", "hydra:dynamic max_nodes=32",
         {"method": "hydra", "tree": "dynamic", "max_nodes": 32}),
        ("eagle:mc_sim_7b_63", "eagle:mc_sim_7b_63", {"method": "eagle", "tree": "mc_sim_7b_63"}),
        ("eagle3:dynamic+ngram", "eagle3:dynamic+ngram",
         {"drafters": [{"method": "eagle3", "tree": "dynamic"}, LOOKUP]}),
        ("plain", "plain", None),
        ("ngram:tree", "ngram:tree", {**LOOKUP, "tree": "tree"}),
        ("hydra:chain:model=a:b/c:max_nodes=4", "hydra:chain max_nodes=4",
         {"method": "hydra", "tree": "chain", "model": "a:b/c", "max_nodes": 4}),
        ('x:tree=[[0],[1]]:widths={"a": 1}', 'x tree=[[0],[1]] widths={"a": 1}',
         {"method": "x", "tree": [[0], [1]], "widths": {"a": 1}}),
        ("ngram+hydar", "ngram+hydar", {"drafters": [LOOKUP, {"method": "hydar"}]}),
        ("ngram + owner/name:chain", "ngram+name:chain",
         {"drafters": [LOOKUP, {"model": "owner/name", "tree": "chain"}]}),
        (f"{DRAFT}:chain:max_nodes=4", "tinycode-draft:chain max_nodes=4",
         {"model": str(DRAFT), "tree": "chain", "max_nodes": 4}),
        (f"ngram:max_nodes=4+{DRAFT}", "ngram max_nodes=4+tinycode-draft",
         {"drafters": [{**LOOKUP, "max_nodes": 4}, {"model": str(DRAFT)}]}),
        (DRAFT, "tinycode-draft", {"model": str(DRAFT)}),
    ],
)  # fmt: skip
def test_what_is_read(text: str | Path, name: str, config: Any) -> None:
    setup = parse_setup(text)
    assert (setup.name, setup.config) == (name, config)


@pytest.mark.parametrize("text", ["ngram:max_nodes=4:max_nodes=5", "ngram:tree:tree=chain", "ngram:method=hydra"])
def test_keys_given_twice(text: str) -> None:
    with pytest.raises(ConfigError, match=r"twice\. Expected it once"):
        parse_setup(text)


@pytest.mark.parametrize("name", ["a:b", "a:tree=b", "chain:chain", "a=b", "ngram"])
def test_paths_may_hold_colons(name: str, tmp_path: Path) -> None:
    place = tmp_path / name
    place.mkdir()
    chain = {"tree": "chain"}
    for text, rest in (("", {}), (":chain", chain), (":chain:max_nodes=4", {**chain, "max_nodes": 4})):
        assert parse_setup(f"{place}{text}").config == {"model": str(place), **rest}
        assert parse_setup(f"ngram+{place}{text}").config == {"drafters": [LOOKUP, {"model": str(place), **rest}]}


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a draft model and EAGLE heads beside it, one of them under the name of how it was trained."""
    directory_of_all = tmp_path_factory.mktemp("beside")
    place = directory_of_all / "small"
    target().module.save_pretrained(place)
    target().module.save_pretrained(f"{place}-draft")
    for kind, name in (("eagle", "eagle"), ("eagle3", "eagle3"), ("eagle", "hass")):
        native.write_checkpoint(read_head(directory(kind))[1], directory_of_all / f"small-{name}")
    return place


def test_eagle_heads_beside_the_target_are_measured_like_others(beside: Path) -> None:
    texts = ["eagle", "eagle3", "eagle:dynamic", "hass:chain:num_speculative_tokens=3", "ngram+hass:chain"]
    setups = [parse_setup(text, target=str(beside)) for text in texts]
    workload = Workload(prompts=["the thing"], temperatures=(0.0,), max_tokens=12, seed=0)
    engines = SetupEngines(load_model(beside, dtype="float32", device="cpu"), tokenizer(), setups, workload)
    assert engines.names[1:] == ["eagle", "eagle3", "eagle:dynamic", "hass:chain num_speculative_tokens=3",
                                 "ngram+hass:chain"]  # fmt: skip
    rows = [engines.measure(name, 0.0, [0]) for name in engines.names]
    assert all(row.texts == rows[0].texts for row in rows)
    assert rows[4].metrics.num_drafted > 0
    assert not any(row.metrics.draft_errors for row in rows)


def test_what_does_not_lie_beside_the_target(beside: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"eagle needs a trained head\. There is no '.*other-eagle'\. Write eagle:model=PLACE"
    ):
        checked_setup("eagle", target=str(beside.with_name("other")))
    with pytest.raises(
        ConfigError, match=r"No directory is known for a target in memory\. Write draft_model:model=PLACE"
    ):
        parse_speculative_config("draft_model", target=None)
    place = f"{beside}-eagle3"
    with pytest.raises(ConfigError, match=r"is an eagle3 head, and method 'eagle' needs an eagle head\. Write eagle3:"):
        checked_setup(f"eagle:model={place}", target=str(beside))


def test_two_heads_of_one_method_have_names_of_their_own(beside: Path) -> None:
    eagle, hass = (f"{beside}-{name}" for name in ("eagle", "hass"))
    texts = [f"eagle:chain:model={eagle}", "ngram", f"eagle:chain:model={hass}", "ngram"]
    setups = checked_setups(texts, target=str(beside))
    assert [setup.name for setup in setups] == texts[:3]
    assert [(setup.config or {}).get("model") for setup in setups] == [eagle, None, hass]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails what opens a connection or asks for an address."""

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"the network was asked: {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("nrgam", r"'nrgam' does not exist\. Did you mean 'ngram'\?"),
        ("zzz", r"'zzz' does not exist\. Known: draft_model, eagle, eagle3, early_exit, falcon, hass, hydra, l"),
        ("ngram:" + "x" * 300, r"there is no tree 'x+… \(str\)\. Known: chain"),
        ("hass2", r"'hass2' does not exist\. Did you mean 'hass'\?"),
        ("ngram+hass2:chain", r"'hass2' does not exist\. Did you mean 'hass'\?"),
        ({"method": "nrgam"}, r"'nrgam' does not exist\. Did you mean 'ngram'\?"),
        ({"model": "nrgam"}, r"there is no directory 'nrgam', .*owner/name\. Did you mean 'ngram'\?"),
        ({"model": "ngram"}, r"there is no directory 'ngram', .* Did you mean 'ngram'\?"),
        ({"drafters": ["ngram", "hydar"]}, r"'hydar' does not exist\. Did you mean 'hydra'\?"),
        ({"drafters": ["ngram"], "acceptence": "block"}, r"'acceptence' stands beside .* Did you mean 'acceptance'\?"),
        ("ngram:num_speculative_token=3", r"no key 'num_speculative_token'\. Did you mean 'num_speculative_tokens'\?"),
        ("ngram:ngram_prompt_lookup_max=3", r"Did you mean 'prompt_lookup_max'\?"),
        ("eagle:eagle_topk=3", r"Did you mean 'tree_top_k'\?"),
        ("@config.json", r"'@config.json' names a file, which only the command line reads"),
        ("ngram:tree=@tree.json", r"'@tree.json' names a file, which only the command line reads"),
        (3, r"speculative_config is 3\. Expected for example \"ngram\""),
        (["ngram"], r"speculative_config is \['ngram'\]\. Expected for example"),
    ],
)
def test_mistakes_are_refused_without_the_network(beside: Path, given: Any, sentence: str) -> None:
    """By `LLM` and by `accelerate`, before anything is loaded; both asked the hub for a method's misspelt name."""
    with pytest.raises(ConfigError, match=sentence):
        LLM(str(beside), speculative_config=given)
    if isinstance(given, str | dict):
        with pytest.raises(ConfigError, match=sentence):
            accelerate(AutoModelForCausalLM.from_pretrained(beside), given)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("given", "methods"),
    [
        ("ngram", ["ngram"]),
        ("ngram+hass:chain:num_speculative_tokens=2", ["ngram", "eagle"]),
        ("ngram+{beside}-eagle3:tree=dynamic", ["ngram", "eagle3"]),
        ("draft_model:num_speculative_tokens=3", ["draft_model"]),
        ("{beside}-draft", ["draft_model"]),
        (Path("{beside}-eagle"), ["eagle"]),
        ('{"method": "hass", "tree": "chain"}', ["eagle"]),
        ({"drafters": ["ngram", {"model": "{beside}-hass"}]}, ["ngram", "eagle"]),
        ("plain", []),
    ],
)
def test_all_forms_draft_in_llm_and_accelerate(beside: Path, given: Any, methods: list[str]) -> None:
    """Heads and draft models are found beside the target, also of a model in memory that came from there."""
    given = _filled(given, str(beside))
    params = SamplingParams(temperature=0.0, max_tokens=12)
    arguments: dict[str, Any] = {"tokenizer": tokenizer(), "dtype": "float32", "device": "cpu"}
    plain = LLM(str(beside), **arguments).generate([5, 6, 7], params)[0].outputs[0]
    model = LLM(f"{beside}/", speculative_config=given, **arguments)  # as a shell completes the name of a directory
    assert [each.name for each in model.drafters] == methods
    assert model.generate([5, 6, 7], params)[0].outputs[0] == plain
    module = AutoModelForCausalLM.from_pretrained(beside, dtype="float32")
    with accelerate(module, given, tokenizer=tokenizer()) as acceleration:
        assert [each.name for each in acceleration.llm.drafters] == methods


def _filled(given: Any, place: str) -> Any:
    """A form with the place of the target filled in."""
    if isinstance(given, dict):
        return json.loads(json.dumps(given).replace("{beside}", place))
    filled = str(given).replace("{beside}", place)
    return Path(filled) if isinstance(given, Path) else filled

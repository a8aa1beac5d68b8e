"""Methods are found by their file's name: adding one is adding a file."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafting_contexts import handle
from end_to_end.tiny_llms import llm

import foretoken.drafters
from foretoken import SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.drafters.base import LONGEST_CHAIN, DrafterOptions, TargetReads
from foretoken.drafters.registry import create_drafter, drafter_options, known_methods
from foretoken.runner.costs import CostCurve
from foretoken.trees.choices import PUBLISHED, TreeShape
from foretoken.trees.merge import Pruning

REPEAT = """
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import DrafterOptions, TargetReads


class Options(DrafterOptions):
    times: int = 1


class RepeatDrafter:
    name, reads = "repeat", TargetReads()

    def __init__(self, times):
        self.times, self.nodes_by_depth = times, range(1, times + 2)

    def attach(self, target):
        pass

    def begin(self, slot, request):
        pass

    def propose(self, context):
        parents = list(range(-1, self.times))
        return TokenTree.from_rows([TreeRow([root] * (self.times + 1), parents) for root in context.roots])

    def commit(self, committed):
        pass

    def release(self, slot):
        pass


def create(options):
    return RepeatDrafter(options.times)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that counts as part of `foretoken.drafters`."""
    monkeypatch.setattr(foretoken.drafters, "__path__", [*foretoken.drafters.__path__, str(tmp_path)])
    yield tmp_path
    for name in [name for name in sys.modules if name == "foretoken.drafters.repeat"]:
        del sys.modules[name]


def test_the_methods_are_the_files() -> None:
    assert {"draft_model", "ngram", "oracle"} <= set(known_methods())
    assert not {"base", "options", "registry", "__init__"} & set(known_methods())
    assert known_methods() == sorted(known_methods())


def test_a_new_file_is_a_new_method(folder: Path) -> None:
    assert "repeat" not in known_methods()
    (folder / "repeat.py").write_text(REPEAT, encoding="utf-8")
    assert "repeat" in known_methods()
    params = SamplingParams(temperature=0.0, max_tokens=30)
    engine = llm({"speculative_config": {"method": "repeat", "times": 3, "num_speculative_tokens": 3}})
    output = engine.generate([5], params)[0]
    assert output.outputs[0] == llm({}).generate([5], params)[0].outputs[0]
    assert output.metrics.num_drafted > 60
    assert output.metrics.accepted_by.keys() <= {"repeat"}
    with pytest.raises(ConfigError, match=r"method 'repeat' has no key 'time'. Did you mean 'times'\?"):
        llm({"speculative_config": {"method": "repeat", "time": 3}})


def test_a_package_that_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that goes is forgotten: what is known of installed packages holds until a folder of theirs changes."""
    monkeypatch.syspath_prepend(tmp_path)
    assert "repeated" not in known_methods()
    information = tmp_path / "repeated-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: repeated\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text("[foretoken.drafters]\nrepeated = math\n", encoding="utf-8")
    assert "repeated" in known_methods()
    with pytest.raises(ConfigError, match="the file of method 'repeated' is no drafter"):
        drafter_options({"method": "repeated"})
    information.rename(tmp_path / "repeated-1.0.gone")
    assert "repeated" not in known_methods()


@pytest.mark.parametrize("method", ["oracel", "adversaria", "dflash", "EAGLE-3", "deepseek_mtp", "p_ard", "zzz"])
def test_tools_are_offered_to_nobody(method: str) -> None:
    with pytest.raises(ConfigError) as caught:
        drafter_options({"method": method})
    offered = str(caught.value).rpartition(": ")[2].rstrip(".").split(", ")
    assert {"draft_model", "ngram"} <= set(offered)
    assert "oracle" not in offered
    assert ("is not there yet" in str(caught.value)) == (method in ("dflash", "deepseek_mtp", "p_ard"))
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("token_recycling", "recycling"),
        ("Token-Recycling", "recycling"),
        ("lookahead_decoding", "lookahead"),
        ("qwen3_5_mtp", "mtp"),
    ],
)
def test_other_names_lead_to_the_method(method: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{method}' is named '{name}' here\. Set 'method' to that\."):
        drafter_options({"method": method})
    assert drafter_options({"method": name}).method == name


NEEDS_MODEL = ("draft_model", "eagle", "eagle3", "falcon", "hydra", "medusa", "mlp_speculator", "mtp", "rest", "spire")


def test_every_method_has_the_two_names_and_sound_options() -> None:
    """What the registry relies on, for each file there is."""
    for method in known_methods():
        keys: dict[str, Any] = {"references": [[1]]} if method == "oracle" else {}
        options = drafter_options({"method": method, **keys})
        assert isinstance(options, DrafterOptions)
        assert options.method == method
        if method in NEEDS_MODEL:
            with pytest.raises(ConfigError, match=f"method '{method}' needs a"):
                create_drafter(options, handle().model).attach(handle())
            continue
        drafter = create_drafter(options, handle().model)
        assert 2 <= drafter.nodes_by_depth[-1] <= 512
        assert isinstance(drafter.name, str)
        assert isinstance(drafter.reads, TargetReads)


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ({}, TreeShape.chain(LONGEST_CHAIN)),
        ({"num_speculative_tokens": 3}, TreeShape.chain(3)),
        ({"max_nodes": 5}, TreeShape.chain(4)),
        ({"num_speculative_tokens": 64}, TreeShape.chain(63)),
        ({"tree": "tree"}, TreeShape.cartesian((2, 2))),
        ({"tree": "tree", "num_speculative_tokens": 1}, TreeShape.cartesian((2,))),
        ({"tree": [[0], [1], [0, 0]]}, TreeShape.from_choices([(0,), (1,), (0, 0)])),
        ({"tree": {"widths": [3, 1]}}, TreeShape.cartesian((3, 1))),
        ({"tree": "zephyr_stage2"}, TreeShape.from_choices(PUBLISHED["zephyr_stage2"])),
    ],
)
def test_shapes_that_options_ask_for(keys: dict[str, Any], shape: TreeShape) -> None:
    assert DrafterOptions(method="any", **keys).shape(lambda: TreeShape.cartesian((2, 2))) == shape


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        ({}, (10, 4, 64)),
        ({"num_speculative_tokens": 3, "tree_top_k": 5, "max_nodes": 60}, (5, 3, 60)),
        ({"max_nodes": 3}, (10, 2, 3)),
    ],
)
def test_dynamic_trees_that_options_ask_for(keys: dict[str, Any], size: tuple[int, int, int]) -> None:
    shape = drafter_options({"method": "hydra", "tree": "dynamic", **keys}).dynamic_shape(4)
    assert (shape.top_k, shape.depth, shape.max_nodes) == size


@pytest.mark.parametrize(
    ("seconds", "keys", "top_k"),
    [
        ([1.0, 1.1, 1.2], {}, 10),
        ([1.0, 4 / 3, 9.0], {}, 4),
        ([1.0, 2.0, 9.0], {}, 3),
        ([1.0, 15.0, 99.0], {}, 2),
        ([1.0, 15.0, 99.0], {"tree_top_k": 7}, 7),
        ([1.0, 15.0, 99.0], {"num_speculative_tokens": 3}, 10),
    ],
)
def test_fewer_candidates_where_wide_passes_cost_much(seconds: list[float], keys: dict[str, int], top_k: int) -> None:
    """Unless the options say how many, or fix how much is drafted."""
    options = drafter_options({"method": "hydra", "tree": "dynamic", **keys})
    assert options.dynamic_shape(4, lambda: CostCurve([1, 16, 128], seconds)).top_k == top_k


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "ngram", "tree": "dynamic"}, "method 'ngram' has no dynamic trees. Expected a method that drafts"),
        ({"method": "hydra", "tree_top_k": 5}, "tree_top_k is 5, which only dynamic trees have: leave it out, or set"),
        ({"method": "hydra", "tree": "dynamic", "tree_top_k": 0}, "tree_top_k"),
        ({"method": "hydra", "tree": "dynamik"}, r"there is no tree 'dynamik'\. Did you mean 'dynamic'"),
    ],
)
def test_dynamic_trees_that_there_are_not(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafter_options(keys)


def test_pruning_that_options_ask_for() -> None:
    options = drafter_options({"method": "hydra", "pruning": {"token_probability": 0.1, "entropy_weighted": 1}})
    assert options.pruning == Pruning(token_probability=0.1, entropy_weighted=1.0)
    assert options.pruning is not None
    assert options.pruning.keys == {"token_probability", "entropy_weighted"}
    assert drafter_options({"method": "ngram", "pruning": None}).pruning is None


@pytest.mark.parametrize(
    ("method", "pruning", "message"),
    [
        (
            "ngram",
            {"path_probability": 0.1},
            r"method 'ngram' cannot prune by 'path_probability': .* Leave 'pruning' out",
        ),
        ("oracle", {"token_probability": 0.1}, "method 'oracle' cannot prune by 'token_probability'"),
        ("hydra", {"token_probability": 2.0}, r"'token_probability' of pruning is 2\.0\. Input should be less than or"),
        ("hydra", {"threshold": 0.1}, "pruning has no key 'threshold'"),
        ("hydra", {}, "pruning: there is no threshold"),
        ("hydra", 0.1, r"pruning is 0\.1\. Expected keys and values\."),
    ],
)
def test_pruning_that_there_is_not(method: str, pruning: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafter_options({"method": method, "pruning": pruning})


def test_sizes_adapt_only_where_nobody_fixed_them() -> None:
    assert DrafterOptions(method="any").is_adaptive
    assert DrafterOptions(method="any", tree="tree").is_adaptive
    assert drafter_options({"method": "hydra", "tree": "dynamic"}).is_adaptive
    assert not drafter_options({"method": "hydra", "tree": "dynamic", "num_speculative_tokens": 3}).is_adaptive
    assert not DrafterOptions(method="any", num_speculative_tokens=3).is_adaptive
    assert not DrafterOptions(method="any", tree={"widths": [2]}).is_adaptive
    assert not drafter_options({"method": "oracle", "references": [[1]]}).is_adaptive

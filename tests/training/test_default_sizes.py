"""Sizes that a head takes from its target when nobody names others."""

from typing import Any

import pytest
from tiny_models import tiny_model

from foretoken.models.loading import wrap_model
from foretoken.training.objectives import head_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("scaling", "kept"),
    [
        ({"rope_type": "default"}, False),
        ({"rope_type": "linear", "factor": 4.0}, True),
        ({"rope_type": "llama3", **LLAMA3}, True),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, False),
    ],
)
def test_rotary_scaling_of_the_decoder_block(
    scaling: dict[str, Any], kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The target's where it is the same at every length of text; else plain, and said so. The base is not copied."""
    target = wrap_model(tiny_model("llama", rope_parameters={"rope_theta": 5e5, **scaling}), name="scaled")
    prefix = head_config("hydra", target, {}).prefix  # type: ignore[attr-defined]
    assert prefix.rope_theta == 10000.0
    assert prefix.rope_scaling == (scaling if kept else None)
    assert ("'dynamic' depends on the length" in caplog.text) == (scaling["rope_type"] == "dynamic")

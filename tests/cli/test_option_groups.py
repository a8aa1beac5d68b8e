"""Groups of options: what typer reads of them, and what a command gets."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

from foretoken.cli import options

GIVEN: list[Any] = []


def command(
    model: str,
    *,
    loading: Annotated[options.LoadOptions, ("device", "dtype")],
    force: bool = False,
    drafter: options.DrafterChoice,
) -> None:
    GIVEN.append((model, loading, force, drafter))


def test_typer_reads_the_fields_in_order_and_the_command_gets_the_groups() -> None:
    flat = options.flattened(command)
    parameters = inspect.signature(flat).parameters
    assert list(parameters) == ["model", "device", "dtype", "force", "speculative_config", "spec_type"]
    assert [each.default for each in parameters.values()][1:] == ["auto", "auto", False, None, None]
    assert parameters["device"].annotation == options.Device
    flat(model="m", device="cpu", dtype="float32", force=True, speculative_config=["ngram"], spec_type=None)
    loading = options.LoadOptions(device="cpu", dtype="float32")
    assert GIVEN.pop() == ("m", loading, True, options.DrafterChoice(speculative_config=["ngram"]))

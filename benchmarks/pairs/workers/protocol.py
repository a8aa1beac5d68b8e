"""What every worker speaks: settings as JSON in the first argument, then a request and an answer a line."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def settings() -> dict[str, Any]:
    """The settings of this worker; what libraries print goes to the file that the settings name."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    os.dup2(os.open(found.pop("log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    return found


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """Says that the model is loaded, and answers every request; its keys are arguments."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)

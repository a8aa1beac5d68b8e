"""What every worker speaks: settings as JSON in the first argument, then a request and an answer a line."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

_settings: dict[str, Any] = json.loads(sys.argv[1])
_answers = os.fdopen(os.dup(1), "w")
_log = os.open(_settings.pop("log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for _stream in (1, 2):  # what libraries print, some when they are imported
    os.dup2(_log, _stream)


def settings() -> dict[str, Any]:
    """The settings of this worker; what libraries print goes to the file that the settings name."""
    return _settings


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """Says that the model is loaded, and answers every request; its keys are arguments."""
    print("ready", file=_answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=_answers, flush=True)

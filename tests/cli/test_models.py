"""`foretoken models`: what is listed can be named."""

from __future__ import annotations

import json

from command_line import MODEL, run, run_process


def test_the_bundled_models_are_listed_with_their_draft_models() -> None:
    found = {each["name"]: each for each in json.loads(run("models", "--json").stdout)["models"]}
    draft = found["models/tinycode-draft"]
    assert draft["drafts_for"][MODEL] == draft["num_bytes"] / found[MODEL]["num_bytes"]
    assert draft["format"] == "safetensors BF16"
    shown = run("models").stdout
    assert "models/tinycode-draft drafts for models/tinycode (15% of its bytes)" in shown
    assert "models/tinycode-hydra" not in shown  # a head


def test_neither_the_list_nor_a_mistyped_name_needs_torch() -> None:
    code = (
        "import sys; from foretoken.cli.main import main\n"
        "for sys.argv[1:] in (['models'], ['generate', 'models/tinycod', '-p', 'x']):\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    done = run_process("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2"
    assert "Did you mean 'models/tinycode'?" in done.stderr

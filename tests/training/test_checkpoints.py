"""What a run keeps between steps: everything that the next step depends on, and nothing that is half written."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from disks import everything
from limits import full_disk
from safetensors.torch import load_file, save_file
from torch import nn

from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats.checkpoint import HeadCheckpoint
from foretoken.training import run_state
from foretoken.training.run_state import MetricsLog, Progress, load_state, save_state, saved_states


class Net(nn.Module):
    """Parameters of several sizes whose order in the optimiser is not that of the module, one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.bias_of_more = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.unused, self.empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.empty(2, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.3)
        return x * self.bias.exp() + self.bias_of_more


POINT = b'{"step": 1, "loss": 2.5, "head_matches": [0.5]}\n'


def made(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    matrices, others = ([p for p in net.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return net, torch.optim.AdamW(groups, lr=1e-2)


def step(net: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    net(torch.full((4, 3), float(number))).square().sum().backward()
    optimizer.step()


def test_round_trip(tmp_path: Path) -> None:
    """Weights, both moments of every parameter by its name, counts and the random numbers to come."""
    net, optimizer = made(1)
    for number in range(3):
        step(net, optimizer, number)
    progress = Progress(step=3, tokens=77, seconds=1.5, skipped=2)
    save_state(tmp_path, net, optimizer, progress)
    for number in range(3, 6):
        step(net, optimizer, number)
    other, its_optimizer = made(2)
    torch.rand(17)
    assert load_state(saved_states(tmp_path)[-1], other, its_optimizer) == progress
    for number in range(3, 6):
        step(other, its_optimizer, number)
    training_runs.same_weights(dict(other.named_parameters()), dict(net.named_parameters()))
    ours, theirs = optimizer.state_dict(), its_optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in ours["state"].items():
        training_runs.same_weights(state, theirs["state"][index])


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    net, optimizer = made(1)
    for number in (5, 6, 10):
        save_state(tmp_path, net, optimizer, Progress(step=number))
    assert [path.name for path in saved_states(tmp_path)] == ["checkpoint-00000006", "checkpoint-00000010"]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_killed_save_left_is_ignored_and_removed(tmp_path: Path) -> None:
    net, optimizer = made(1)
    save_state(tmp_path, net, optimizer, Progress(step=5))
    shutil.copytree(tmp_path / "checkpoint-00000005", tmp_path / ".checkpoint-00000006-1234567")
    assert [path.name for path in saved_states(tmp_path)] == ["checkpoint-00000005"]
    save_state(tmp_path, net, optimizer, Progress(step=7))
    # Each is as large as the head with both moments: crash after crash they would fill the disk.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000005", "checkpoint-00000007"]


def test_moments_lie_under_the_names_of_their_parameters(tmp_path: Path) -> None:
    net, optimizer = made(1)
    step(net, optimizer, 1)
    save_state(tmp_path, net, optimizer, Progress(step=1))
    tensors = load_file(tmp_path / "checkpoint-00000001" / "state.safetensors")
    for name, parameter in net.named_parameters():
        state = optimizer.state[parameter]
        assert (f"optimizer.{name}.exp_avg" in tensors) == bool(state)
        for key, value in state.items():
            assert torch.equal(tensors[f"optimizer.{name}.{key}"], value)


def test_a_failed_save_leaves_the_last_one(tmp_path: Path) -> None:
    net, optimizer = made(1)
    save_state(tmp_path, net, optimizer, Progress(step=5))
    before = everything(tmp_path)
    with full_disk(), pytest.raises(ModelError, match=r"cannot be written: .*File too large.*\. Nothing was changed"):
        save_state(tmp_path, net, optimizer, Progress(step=6))
    assert everything(tmp_path) == before


@pytest.mark.parametrize("damage", [b"}\n", b"\xff}\n", b"{}\n", b'{"step": "x"}\n', b"3\n", b'{"step": 1}\n', b"\n"])
def test_damaged_curves_are_refused_but_for_an_unfinished_line(damage: bytes, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(POINT + b'{"step": 2, "lo')
    MetricsLog(tmp_path, 1).close()
    assert file.read_bytes() == POINT
    file.write_bytes(POINT + damage + POINT)
    with pytest.raises(ModelError, match=r"metrics\.jsonl' is damaged: .*Remove the file: the run goes on"):
        MetricsLog(tmp_path, 1)
    assert file.read_bytes() == POINT + damage + POINT


def test_settings_and_curves_on_a_full_disk_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(POINT * 10)
    before = everything(tmp_path)
    with full_disk(64), pytest.raises(ModelError, match=r"metrics\.jsonl' cannot be written: File too large\."):
        MetricsLog(tmp_path, 1)
    with full_disk(64), pytest.raises(ConfigError, match=r"settings\.json' cannot be written: File too large\."):
        training_runs.trained(tmp_path, schedule={"num_steps": 2})
    assert {path: data for path, data in everything(tmp_path).items() if path.name != "run.lock"} == before


@pytest.mark.parametrize("board_fails", [False, True])
def test_curves_end_on_a_full_disk_in_one_sentence(
    board_fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Board:
        def add_scalar(self, *_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_state, "_board", lambda *_: Board() if board_fails else None)
    log = MetricsLog(tmp_path, 0)
    with full_disk(64):
        for step in (1, 2):
            log.write(step, {"loss": 0.5})
        with pytest.raises(ModelError, match=r"metrics\.jsonl' cannot be written: File too large\..* Make some"):
            log.write(3, {"loss": 0.5})
        log.close()
    assert [record.getMessage() for record in caplog.records] == board_fails * [
        "tensorboard gets no more curves: [Errno 28] No space left on device"
    ]


def rewritten(checkpoint: Path, change: Any) -> None:
    tensors = load_file(checkpoint / "state.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "state.safetensors")


DAMAGES: dict[str, Any] = {
    "cut": lambda at: (at / "state.safetensors").write_bytes((at / "state.safetensors").read_bytes()[:-9]),
    "garbage": lambda at: (at / "state.safetensors").write_bytes(b"\x00" * 500),
    "no tensors": lambda at: (at / "state.safetensors").unlink(),
    **{
        f"progress {text}": lambda at, text=text: (at / "progress.json").write_text(text)
        for text in (
            '{"step": 5, "tok',
            "",
            "{}",
            "[1]",
            '{"epoch": 1}',
            '{"step": "5"}',
            '{"step": 5, "tokens": "x"}',
            '{"step": 4}',
            "\x00",
        )
    },
    "missing weight": lambda at: rewritten(at, lambda t: t.pop("module.layers.0.weight")),
    "unknown weight": lambda at: rewritten(at, lambda t: t.update({"module.more": torch.ones(1)})),
    "other shape": lambda at: rewritten(at, lambda t: t.update({"module.layers.0.weight": torch.ones(2, 3)})),
    "no random numbers": lambda at: rewritten(at, lambda t: t.pop("random.cpu")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_sentence(tmp_path: Path, damage: str) -> None:
    net, optimizer = made(1)
    step(net, optimizer, 0)
    save_state(tmp_path, net, optimizer, Progress(step=5))
    (checkpoint,) = saved_states(tmp_path)
    DAMAGES[damage](checkpoint)
    with pytest.raises(ModelError, match=r"checkpoint-00000005' cannot be read: .*Remove it to go on from") as caught:
        load_state(checkpoint, *made(2))
    assert "\n" not in str(caught.value)


def test_a_run_says_that_its_checkpoint_is_damaged_and_goes_on_without(tmp_path: Path) -> None:
    whole = training_runs.trained(tmp_path / "run", save_every_s=-1.0).weights
    checkpoint = saved_states(tmp_path / "run")[-1]
    DAMAGES["cut"](checkpoint)
    with pytest.raises(ModelError, match="cannot be read"):
        training_runs.trained(tmp_path / "run", save_every_s=-1.0)
    shutil.rmtree(checkpoint)
    training_runs.same_weights(training_runs.trained(tmp_path / "run", save_every_s=-1.0).weights, whole)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"schedule": {"peak": 2e-2}}, "train.schedule.peak"),
    "steps": ({"schedule": {"num_steps": 9}}, "train.schedule.num_steps"),
    "seed": ({"seed": 1}, "train.seed"),
    "batch": ({"batch_size": 2}, "train.batch_size"),
    "head": ({"sizes": {"num_heads": 2}}, "head.num_heads"),
    "objective": ({"weights": {"ce_weight": 0.5}}, "objective.ce_weight"),
    "data": ({"data": "another text"}, "data"),
    "method": ({"method": "mlp_speculator"}, "method"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_are_refused_by_name(tmp_path: Path, name: str) -> None:
    training_runs.trained(tmp_path, schedule={"num_steps": 2})
    before = everything(tmp_path)
    changes, key = OTHERS[name]
    changes = {**changes, "schedule": {"num_steps": 2, **changes.get("schedule", {})}}
    with pytest.raises(ConfigError, match=r"holds a run with other settings; they differ in .*\b" + key) as caught:
        training_runs.trained(tmp_path, **changes)
    if name != "method":
        assert str(caught.value).split("differ in ")[1].startswith(f"{key}. Expected")
    assert everything(tmp_path) == before


def test_another_head_to_begin_from_is_refused(tmp_path: Path) -> None:
    settings = training_runs.settings(tmp_path / "run", schedule={"num_steps": 2})
    first = training_runs.trained(tmp_path / "first", schedule={"num_steps": 2})
    arguments = (training_runs.target(), training_runs.batches(), settings)
    one, again = (training_runs.train_head(*arguments, initial=first)[0] for _ in range(2))
    training_runs.same_weights(again.weights, one.weights)
    changed = {key: value + 1 for key, value in first.weights.items()}
    second = HeadCheckpoint(config=first.config, weights=changed, target=first.target)
    for initial in (second, None):
        with pytest.raises(ConfigError, match="they differ in initial"):
            training_runs.train_head(*arguments, initial=initial)


def test_half_written_settings_are_one_sentence(tmp_path: Path) -> None:
    training_runs.trained(tmp_path, schedule={"num_steps": 2})
    for text in ("", '{"method": "med', "[1]", "[" * 100_000):
        (tmp_path / "settings.json").write_text(text)
        with pytest.raises((ConfigError, ModelError), match=r"settings\.json"):
            training_runs.trained(tmp_path, schedule={"num_steps": 2})


def test_lines_of_steps_that_are_done_again_go_away(tmp_path: Path) -> None:
    training_runs.trained(tmp_path, save_every_s=-1.0)
    shutil.rmtree(saved_states(tmp_path)[-1])  # now the last one is of step 5
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    training_runs.trained(tmp_path, save_every_s=-1.0)
    assert [line["step"] for line in training_runs.metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_run_from_before_a_setting_existed_goes_on(tmp_path: Path) -> None:
    """A setting that is off is the same as one that nobody knew of."""
    whole = training_runs.trained(tmp_path, schedule={"num_steps": 2}).weights
    settings = json.loads((tmp_path / "settings.json").read_text())
    unset = [key for key, value in settings.items() if value is None]
    assert "initial" in unset
    (tmp_path / "settings.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    training_runs.same_weights(training_runs.trained(tmp_path, schedule={"num_steps": 2}).weights, whole)

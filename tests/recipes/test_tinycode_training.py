"""The tinycode training loop: same mathematics as Hugging Face, exact resume, decay schedule, window order."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from recipes.tinycode import checkpoint
from recipes.tinycode.data import Batches
from recipes.tinycode.evaluate import held_out_loss, loss_by_context, token_losses
from recipes.tinycode.export import hf_config
from recipes.tinycode.model import CONFIGS, ModelConfig, TinyLlama, config_of
from recipes.tinycode.optimizer import orthogonalise
from recipes.tinycode.schedule import Schedule
from recipes.tinycode.train import Progress, Trainer, main

TOY = ModelConfig(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=512,
)


def toy_batches(seed: int = 3) -> Batches:
    stream = torch.from_numpy(np.random.default_rng(0).integers(0, 64, 4096).astype(np.int16))
    return Batches(stream=stream, tokens_per_step=64, seed=seed)


def toy_trainer() -> Trainer:
    schedule = Schedule(peak=1e-2, warmup_steps=2)
    return Trainer(TOY, toy_batches(), schedule, windows=(16,), long_windows=(16, 32), seed=1)


@pytest.mark.parametrize("length", [7, 300])  # below and above one query block
def test_matches_hugging_face_llama(length: int) -> None:
    model = TinyLlama(TOY)
    model.init_weights(torch.Generator().manual_seed(0))
    reference = LlamaForCausalLM(hf_config(TOY, eos_id=0)).float().eval()
    missing = reference.load_state_dict(model.state_dict(), strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    assert not missing.unexpected_keys
    reference.tie_weights()
    ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(ids).logits, rtol=1e-4, atol=1e-5)  # float32 summation order


def test_weights_come_from_a_checkpoint_and_from_an_export(tmp_path: Path) -> None:
    trained = toy_trainer()
    trained.train_step(0.0)
    checkpoint.save(tmp_path / "run.pt", trained.model, trained.optimizer, {"step": 1})
    save_file(trained.model.state_dict(), tmp_path / "model.safetensors")
    for path in (tmp_path / "run.pt", tmp_path):
        other = TinyLlama(TOY)
        checkpoint.load_weights(path, other)
        assert all(torch.equal(p, other.state_dict()[name]) for name, p in trained.model.state_dict().items())
    (tmp_path / "model.safetensors").unlink()
    save_file({"unknown.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="Missing key"):
        checkpoint.load_weights(tmp_path, other)


def test_an_export_keeps_its_own_context(tmp_path: Path) -> None:
    config = ModelConfig(**{**{k: getattr(CONFIGS["draft"], k) for k in CONFIGS["draft"].__slots__}, "rope_theta": 1e4})
    hf_config(config, eos_id=0).save_pretrained(tmp_path)
    assert config_of(tmp_path, "draft") == config
    assert config_of(tmp_path / "run.pt", "draft") == CONFIGS["draft"]


def test_resume_is_bit_equal(tmp_path: Path) -> None:
    straight = toy_trainer()
    losses = [straight.train_step(step / 10) for step in range(10)]
    first = toy_trainer()
    for step in range(5):
        first.train_step(step / 10)
    path = tmp_path / "run.pt"
    checkpoint.save(path, first.model, first.optimizer, {"step": first.progress.step, "tokens": first.progress.tokens})
    second = toy_trainer()
    second.progress = Progress(**checkpoint.load(path, second.model, second.optimizer))
    resumed = [second.train_step(step / 10) for step in range(5, 10)]
    assert resumed == losses[5:]
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert straight.progress.tokens == second.progress.tokens == 640


def test_training_lowers_the_loss() -> None:
    trainer = toy_trainer()
    trainer.batches.stream = torch.arange(64, dtype=torch.int16).repeat(64)
    losses = [trainer.train_step(0.0) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_rate_warms_up_by_step_and_falls_by_the_share_of_the_run() -> None:
    schedule = Schedule(peak=1.0, warmup_steps=10, decay_share=0.4)
    assert schedule.lr(0, 0.0) == pytest.approx(0.1)
    assert schedule.lr(1000, 0.59) == 1.0
    assert schedule.lr(1000, 0.7) == pytest.approx(0.5)  # 1 - sqrt(0.1 / 0.4)
    assert schedule.lr(1000, 1.0) == schedule.lr(1000, 1.2) == pytest.approx(0.0)
    assert not schedule.decaying(0.59)
    assert schedule.decaying(0.61)


def test_long_windows_come_while_the_rate_falls() -> None:
    trainer = toy_trainer()
    seen = []
    for step in range(9):
        seen.append(trainer.window(step / 9))
        trainer.progress.step += 1
    assert seen == [16] * 6 + [16, 32, 16]  # by step in turn: steps 6, 7, 8


def test_an_epoch_sees_each_window_once_and_depends_on_the_seed() -> None:
    batches = toy_batches()
    count = len(batches.stream) // 16 - 2
    starts = np.concatenate([batches.starts(step, 16) for step in range(-(-count // 4))])[:count]
    assert len(set(starts.tolist())) == count
    assert set(np.diff(np.sort(starts))) == {16}
    assert batches.starts(0, 16).tolist() != toy_batches(seed=4).starts(0, 16).tolist()
    window = batches.batch(5, 32)
    assert window.shape == (2, 33)
    assert window[1].tolist() == batches.stream[(start := batches.starts(5, 32)[1]) : start + 33].tolist()


def test_the_distilled_loss_is_the_stated_mix() -> None:
    trainer, teacher = toy_trainer(), toy_trainer()
    teacher.train_step(0.0)
    trainer.teacher, trainer.kl_weight = teacher.model, 0.25
    batch = trainer.batches.batch(0, 16)
    with torch.no_grad():
        log_q, log_p = (t.model(batch[:, :-1]).log_softmax(-1) for t in (trainer, teacher))
        kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean()
        expected = 0.25 * kl + 0.75 * held_out_loss(trainer.model, batch)
    torch.testing.assert_close(trainer.loss(batch), expected)
    trainer.loss(batch).backward()
    assert all(p.grad is None for p in teacher.model.parameters())


def test_loss_by_context_compares_the_same_tokens() -> None:
    model = toy_trainer().model
    stream = torch.from_numpy(np.random.default_rng(1).integers(0, 64, 2000).astype(np.int16))
    result = loss_by_context(model, stream, 512, 2)
    windows = torch.stack([stream[:513], stream[2000 - 513 :]]).long()
    halves = torch.cat([windows[:, :257], windows[:, 256:]])
    assert result["by_window"] == pytest.approx({256: held_out_loss(model, halves), 512: held_out_loss(model, windows)})
    losses = token_losses(model, windows)
    assert list(result["by_position"]) == [32, 64, 128, 256, 512]
    assert result["by_position"][512] == pytest.approx(float(losses[:, 256:].mean()))


@pytest.mark.slow
def test_a_run_by_the_clock_ends_in_a_checkpoint_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.random.default_rng(2).integers(0, 6144, 200_000).astype(np.uint16)
    np.save(tmp_path / "train.npy", ids)
    np.save(tmp_path / "held_out.npy", ids[:40_000])
    command = ["train", "--run-dir", str(tmp_path), "--model", "draft", "--no-compile", "--tokens-per-step", "512"]
    command += ["--windows", "64", "--long-windows", "64", "256", "--threads", "1"]
    monkeypatch.setattr("sys.argv", [*command, "--seconds", "2"])
    main()
    first = checkpoint.load(tmp_path / "draft.pt", TinyLlama(CONFIGS["draft"]))
    assert first["step"] > 0
    assert first["tokens"] == 512 * first["step"]
    assert first["seconds"] >= 2
    monkeypatch.setattr("sys.argv", [*command, "--steps", str(first["step"] + 2)])
    main()
    assert checkpoint.load(tmp_path / "draft.pt", TinyLlama(CONFIGS["draft"]))["step"] == first["step"] + 2
    monkeypatch.setattr("sys.argv", [*command, "--steps", "2", "--windows", "100"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "window length 100 must divide" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(2, 8, 24), (2, 24, 8)])
def test_orthogonalise_flattens_the_spectrum(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices).float())
    assert values.min() > 0.5  # the quintic iteration ends in about [0.7, 1.2], not at 1
    assert values.max() < 1.4

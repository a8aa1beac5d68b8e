"""The tinycode training loop: same mathematics as Hugging Face, exact resume, decay schedule, window order."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from recipes.tinycode import checkpoint
from recipes.tinycode.data import LONG_EVERY, Batches
from recipes.tinycode.export import hf_config
from recipes.tinycode.model import ModelConfig, TinyLlama
from recipes.tinycode.optimizer import orthogonalise
from recipes.tinycode.schedule import Schedule
from recipes.tinycode.train import Progress, Trainer

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
    stream = np.random.default_rng(0).integers(0, 64, 4096).astype(np.uint16)
    return Batches(stream=stream, tokens_per_step=64, short_len=16, long_len=32, seed=seed)


def toy_trainer(schedule: Schedule | None = None) -> Trainer:
    return Trainer(TOY, toy_batches(), schedule or Schedule(peak=1e-2, warmup_steps=2), seed=1)


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
    trained.train_step()
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


def test_resume_is_bit_equal(tmp_path: Path) -> None:
    straight = toy_trainer()
    losses = [straight.train_step() for _ in range(10)]
    first = toy_trainer()
    for _ in range(5):
        first.train_step()
    path = tmp_path / "run.pt"
    checkpoint.save(path, first.model, first.optimizer, {"step": first.progress.step, "tokens": first.progress.tokens})
    second = toy_trainer()
    second.progress = Progress(**checkpoint.load(path, second.model, second.optimizer))
    resumed = [second.train_step() for _ in range(5)]
    assert resumed == losses[5:]
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert straight.progress.tokens == second.progress.tokens == 640


def test_training_lowers_the_loss() -> None:
    trainer = toy_trainer()
    trainer.batches.stream = np.tile(np.arange(64, dtype=np.uint16), 64)
    losses = [trainer.train_step() for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_distilled_loss_is_the_stated_mix() -> None:
    trainer, teacher = toy_trainer(), toy_trainer()
    teacher.train_step()
    trainer.kl_weight = 0.25
    batch = trainer.batches.batch(0)
    ids, labels = batch[:, :-1], batch[:, 1:]
    with torch.no_grad():
        log_q, log_p = (each.model(ids).log_softmax(-1) for each in (trainer, teacher))
        kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean()
        expected = 0.25 * kl - 0.75 * log_q.gather(-1, labels.unsqueeze(-1)).mean()
        torch.testing.assert_close(trainer._distil_loss(ids, labels, teacher.model(ids)), expected)


def test_decay_branch_schedule() -> None:
    stable = Schedule(peak=1.0, warmup_steps=10)
    branch = Schedule(peak=1.0, warmup_steps=10, decay_start=100, decay_steps=16)
    assert stable.lr(0) == pytest.approx(0.1)
    assert [branch.lr(s) for s in range(101)] == [stable.lr(s) for s in range(101)]
    assert branch.lr(104) == pytest.approx(0.5)  # 1 - sqrt(4 / 16)
    assert stable.lr(10**6) == 1.0
    assert branch.lr(116) == branch.lr(500) == 0.0


def test_an_epoch_sees_each_window_once_and_depends_on_the_seed() -> None:
    batches = toy_batches()
    count = len(batches.stream) // 16 - 2
    windows = [batches._window(16, i).tobytes() for i in range(count)]
    assert len(set(windows)) == count
    assert windows[0] != toy_batches(seed=4)._window(16, 0).tobytes()
    assert batches.batch(LONG_EVERY - 1).shape == (2, 33)
    assert batches.batch(LONG_EVERY).shape == (4, 17)


@pytest.mark.parametrize("shape", [(2, 8, 24), (2, 24, 8)])
def test_orthogonalise_flattens_the_spectrum(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices).float())
    assert values.min() > 0.5  # the quintic iteration ends in about [0.7, 1.2], not at 1
    assert values.max() < 1.4

"""Turns a prepared call of transformers' `generate` into prompts and parameters, or says why transformers serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, StoppingCriteriaList

from foretoken.core.errors import RequestError
from foretoken.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from foretoken.runner.runner import Runner


class Meaning(NamedTuple):
    """What acceleration does with a field or an argument.

    Attributes:
        how: "works", "no effect" (nothing that is served here depends on it), or "by transformers" (once it is set).
        neutral: Values, besides None, with which transformers need not serve the call.
        note: A note for users.
    """

    how: str
    neutral: tuple[Any, ...] = ()
    note: str = ""


def _works(note: str = "") -> Meaning:
    return Meaning("works", (), note)


def _idle(note: str) -> Meaning:
    return Meaning("no effect", (), note)


def _theirs(*neutral: Any, note: str = "") -> Meaning:
    return Meaning("by transformers", neutral, note)


_BEAMS, _ASSISTED = "belongs to beam search", "belongs to assisted generation"
_COMPILED, _NO_SCORES = "foretoken compiles nothing with this field", "logits of drafted passes are not kept"

FIELDS: Mapping[str, Meaning] = {
    "max_length": _works("at most the model's context, else by transformers"),
    "max_new_tokens": _works("at most the model's context with the prompt, else by transformers"),
    "min_length": _works(),
    "min_new_tokens": _works(),
    "early_stopping": _idle(_BEAMS),
    "max_time": _works("checked after every token"),
    "stop_strings": _works("`generate` or `accelerate` needs `tokenizer=`"),
    "do_sample": _works("the engine makes its own seeds: `torch.manual_seed` has no effect"),
    "num_beams": _theirs(1),
    "use_mtp": _theirs(False),
    "use_cache": _idle("there is always a cache"),
    "cache_implementation": _theirs(note="the engine has a cache of its own"),
    "cache_config": _theirs(note="the engine has a cache of its own"),
    "max_cache_len": _idle("the engine has a cache of its own"),
    "temperature": _works(),
    "top_k": _works(),
    "top_p": _works(),
    "min_p": _works(),
    "top_h": _theirs(),
    "typical_p": _theirs(1.0),
    "epsilon_cutoff": _theirs(0.0),
    "eta_cutoff": _theirs(0.0),
    "repetition_penalty": _works(),
    "encoder_repetition_penalty": _theirs(1.0),
    "length_penalty": _idle(_BEAMS),
    "no_repeat_ngram_size": _theirs(0),
    "bad_words_ids": _works(),
    "renormalize_logits": _idle("changes scores, which are not returned, and no choice"),
    "forced_bos_token_id": _theirs(),
    "forced_eos_token_id": _theirs(),
    "remove_invalid_values": _theirs(False),
    "exponential_decay_length_penalty": _theirs(),
    "suppress_tokens": _works(),
    "begin_suppress_tokens": _theirs(),
    "sequence_bias": _theirs(),
    "token_healing": _theirs(False),
    "guidance_scale": _theirs(1, 1.0),
    "watermarking_config": _theirs(),
    "num_return_sequences": _works(),
    "output_attentions": _theirs(False),
    "output_hidden_states": _theirs(False),
    "output_scores": _theirs(False, note=_NO_SCORES),
    "output_logits": _theirs(False, note=_NO_SCORES),
    "return_dict_in_generate": _works("a `GenerateDecoderOnlyOutput` whose `past_key_values` is None"),
    "pad_token_id": _works(),
    "bos_token_id": _works(),
    "eos_token_id": _works("one or a list"),
    "encoder_no_repeat_ngram_size": _theirs(0),
    "decoder_start_token_id": _idle("belongs to encoder-decoder models"),
    "is_assistant": _theirs(False),
    "num_assistant_tokens": _idle(_ASSISTED),
    "num_assistant_tokens_schedule": _idle(_ASSISTED),
    "assistant_confidence_threshold": _idle(_ASSISTED),
    "prompt_lookup_num_tokens": _theirs(note="assisted generation; `drafter='ngram'` is the same idea"),
    "max_matching_ngram_size": _idle(_ASSISTED),
    "assistant_early_exit": _theirs(note="assisted generation; `drafter='early_exit'` is the same idea"),
    "assistant_lookbehind": _idle(_ASSISTED),
    "target_lookbehind": _idle(_ASSISTED),
    "assistant_ensemble_weight": _theirs(),
    "speculation_type": _theirs(),
    "compile_config": _idle(_COMPILED),
    "disable_compile": _idle(_COMPILED),
    "continuous_batching_config": _idle("belongs to `generate_batch`"),
    "low_memory": _idle("belongs to contrastive search"),
    "penalty_alpha": _theirs(0, 0.0),
    "dola_layers": _theirs(),
    "diversity_penalty": _idle(_BEAMS),
    "num_beam_groups": _theirs(1),
    "constraints": _theirs(),
    "force_words_ids": _theirs(),
    "prefill_chunk_size": _idle("prompts are fed in chunks of the engine's choice"),
    "_from_model_config": _idle("says where the configuration came from"),
    "transformers_version": _idle("says where the configuration came from"),
}

ARGUMENTS: Mapping[str, Meaning] = {
    "inputs": _works("token ids, padded on the left"),
    "generation_config": _works(),
    "logits_processor": _theirs(note="a list with anything in it"),
    "stopping_criteria": _works("called after every token with the ids so far; `scores` is None, as in transformers"),
    "prefix_allowed_tokens_fn": _theirs(),
    "synced_gpus": _theirs(False),
    "assistant_model": _theirs(note="assisted generation; `accelerate(model, drafter=assistant)` is the same idea"),
    "streamer": _works(),
    "negative_prompt_ids": _theirs(),
    "negative_prompt_attention_mask": _theirs(),
    "custom_generate": _theirs(),
    "input_ids": _works("as `inputs`"),
    "attention_mask": _works("2-D with zeros on the left, then ones; else by transformers"),
    "tokenizer": _works("for `stop_strings`"),
    "trust_remote_code": _idle("belongs to `custom_generate`"),
}


def set_field(config: GenerationConfig) -> str | None:
    """Returns the first field of a configuration with defaults that only transformers can serve; None without any."""
    for name in GenerationConfig().to_dict():
        value = getattr(config, name, None)
        meaning = FIELDS.get(name, _theirs())
        if meaning.how == "by transformers" and value is not None and value not in meaning.neutral:
            return name
    return None


def set_argument(arguments: Mapping[str, Any]) -> str | None:
    """Returns the first argument of `generate`, besides fields, that only transformers can serve; None without any."""
    for name, value in arguments.items():
        meaning = ARGUMENTS.get(name, _theirs())
        is_neutral = value is None or value is False or (isinstance(value, list) and not value)
        if meaning.how == "by transformers" and not is_neutral:
            return name
    return None


class Unserved(Exception):
    """transformers has to serve a call; the text is the reason."""


def read_request(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    target: Runner,
) -> tuple[list[list[int]], SamplingParams]:
    """Reads what `generate` prepared for its decoding loop; raises `Unserved` when transformers has to serve the call.

    Returns token ids of each row without padding, and the parameters of all rows. A row ends where transformers ends
    it, or later.

    Args:
        input_ids: (B, T) int64, padded.
        attention_mask: (B, T), 0 at padding; None without padding.
        criteria: All stopping criteria.
        config: With defaults and `generate`'s own tensors of special tokens.
        target: Bounds the tokens of a sequence.
    """
    prompts, width = _prompts(input_ids, attention_mask), input_ids.shape[1]
    if criteria.max_length is None:
        raise Unserved("nothing bounds the length")
    if getattr(config, "_pad_token_tensor", None) is None and any(hasattr(each, "eos_token_id") for each in criteria):
        raise Unserved("nothing says what rows that are over are padded with")
    num_new = max(criteria.max_length - width, 1)
    longest = max(map(len, prompts)) + num_new
    if longest > target.context_len:
        raise Unserved(f"{longest} tokens are longer than the engine's context of {target.context_len}")
    ends = [token for each in criteria if type(each) is EosTokenCriteria for token in each.eos_token_id.tolist()]
    eos = getattr(config, "_eos_token_tensor", None)
    eos_ids = [] if eos is None else eos.tolist()
    least = 0 if eos is None else min(max((config.min_length or 0) - width, config.min_new_tokens or 0), num_new)
    if least > 0 and not {*target.model.eos_ids, *ends} <= set(eos_ids):
        raise Unserved("a minimum length holds back other end-of-sequence tokens than the model's")
    words = [list(word) for word in config.bad_words_ids or () if list(word) not in [[token] for token in eos_ids]]
    words += [[token] for token in config.suppress_tokens or ()]
    try:
        params = SamplingParams(
            max_tokens=num_new, min_tokens=max(least, 0), ignore_eos=True, stop_token_ids=ends, bad_words=words,
            repetition_penalty=config.repetition_penalty, **_sampling(config),
        )  # fmt: skip
    except RequestError as err:
        raise Unserved(str(err)) from err
    return prompts, params


def _sampling(config: GenerationConfig) -> dict[str, Any]:
    if not config.do_sample:
        return {"temperature": 0.0}
    return {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p, "min_p": config.min_p}


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    rows: list[list[int]] = input_ids.tolist()
    if attention_mask is not None:
        if bool(
            ((attention_mask != 0) & (attention_mask != 1)).any()
        ):  # transformers derives positions from other values
            raise Unserved("the attention mask holds other values than 0 and 1")
        mask = attention_mask.bool().tolist()
        if [len(row) for row in mask] != [len(row) for row in rows]:
            raise Unserved("the attention mask has another shape than the token ids")
        if any(sorted(row) != row for row in mask):
            raise Unserved("the attention mask hides more than padding on the left")
        rows = [row[len(row) - sum(real) :] for row, real in zip(rows, mask, strict=True)]
    if not all(rows):
        raise Unserved("a prompt is empty")
    return rows

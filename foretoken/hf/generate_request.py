"""Turns a prepared call of transformers' `generate` into prompts and parameters, or says why transformers serves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, StoppingCriteriaList

from foretoken.core.errors import RequestError
from foretoken.core.sampling_params import SamplingParams

if TYPE_CHECKING:
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


def _works(*names: str, note: str = "") -> dict[str, Meaning]:
    return dict.fromkeys(names, Meaning("works", (), note))


def _idle(note: str, *names: str) -> dict[str, Meaning]:
    return dict.fromkeys(names, Meaning("no effect", (), note))


def _theirs(*names: str, neutral: tuple[Any, ...] = (), note: str = "") -> dict[str, Meaning]:
    return dict.fromkeys(names, Meaning("by transformers", neutral, note))


_UNKNOWN = Meaning("by transformers")  # of a later release

FIELDS: Mapping[str, Meaning] = {
    **_works("max_length", note="at most the model's context, else by transformers"),
    **_works("max_new_tokens", note="at most the model's context with the prompt, else by transformers"),
    **_works("min_length", "min_new_tokens"),
    **_works("max_time", note="checked after every token"),
    **_works("stop_strings", note="`generate` or `accelerate` needs `tokenizer=`"),
    **_works("do_sample", note="the engine makes its own seeds: `torch.manual_seed` has no effect"),
    **_works("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "bad_words_ids", "suppress_tokens"),
    **_works("num_return_sequences", "pad_token_id", "bos_token_id"),
    **_works("return_dict_in_generate", note="a `GenerateDecoderOnlyOutput` whose `past_key_values` is None"),
    **_works("eos_token_id", note="one or a list"),
    **_idle("belongs to beam search", "early_stopping", "length_penalty", "diversity_penalty"),
    **_idle("there is always a cache", "use_cache"),
    **_idle("the engine has a cache of its own", "max_cache_len"),
    **_idle("changes scores, which are not returned, and no choice", "renormalize_logits"),
    **_idle("belongs to encoder-decoder models", "decoder_start_token_id"),
    **_idle(
        "belongs to assisted generation", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind",
    ),
    **_idle("foretoken compiles nothing with this field", "compile_config", "disable_compile"),
    **_idle("belongs to `generate_batch`", "continuous_batching_config"),
    **_idle("belongs to contrastive search", "low_memory"),
    **_idle("prompts are fed in chunks of the engine's choice", "prefill_chunk_size"),
    **_idle("says where the configuration came from", "_from_model_config", "transformers_version"),
    **_theirs("num_beams", "num_beam_groups", neutral=(1,)),
    **_theirs("cache_implementation", "cache_config", note="the engine has a cache of its own"),
    **_theirs("output_scores", "output_logits", neutral=(False,), note="logits of drafted passes are not kept"),
    **_theirs(
        "use_mtp", "remove_invalid_values", "token_healing", "output_attentions", "output_hidden_states",
        "is_assistant", neutral=(False,),
    ),
    **_theirs("typical_p", "encoder_repetition_penalty", neutral=(1.0,)),
    **_theirs("epsilon_cutoff", "eta_cutoff", neutral=(0.0,)),
    **_theirs("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", neutral=(0,)),
    **_theirs("guidance_scale", neutral=(1, 1.0)),
    **_theirs("penalty_alpha", neutral=(0, 0.0)),
    **_theirs(
        "top_h", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
        "begin_suppress_tokens", "sequence_bias", "watermarking_config", "assistant_ensemble_weight",
        "speculation_type", "dola_layers", "constraints", "force_words_ids",
    ),
    **_theirs("prompt_lookup_num_tokens", note="assisted generation; `drafter='ngram'` is the same idea"),
    **_theirs("assistant_early_exit", note="assisted generation; `drafter='early_exit'` is the same idea"),
}  # fmt: skip

ARGUMENTS: Mapping[str, Meaning] = {
    **_works("inputs", note="token ids, padded on the left"),
    **_works("input_ids", note="as `inputs`"),
    **_works("attention_mask", note="2-D with zeros on the left, then ones; else by transformers"),
    **_works("generation_config", "streamer"),
    **_works(
        "stopping_criteria",
        note="called after every token with the ids so far; `scores` is None, as in transformers",
    ),
    **_works("tokenizer", note="for `stop_strings`"),
    **_idle("belongs to `custom_generate`", "trust_remote_code"),
    **_theirs("logits_processor", note="a list with anything in it"),
    **_theirs("assistant_model", note="assisted generation; `accelerate(model, drafter=assistant)` is the same idea"),
    **_theirs("synced_gpus"),
    **_theirs("prefix_allowed_tokens_fn", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate"),
}


def set_field(config: GenerationConfig) -> str | None:
    """Returns the first field of a configuration with defaults that only transformers can serve; None without any."""
    for name in GenerationConfig().to_dict():
        value = getattr(config, name, None)
        meaning = FIELDS.get(name, _UNKNOWN)
        if meaning.how == "by transformers" and value is not None and value not in meaning.neutral:
            return name
    return None


def set_argument(arguments: Mapping[str, Any]) -> str | None:
    """Returns the first argument of `generate`, besides fields, that only transformers can serve; None without any."""
    for name, value in arguments.items():
        meaning = ARGUMENTS.get(name, _UNKNOWN)
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

    Args:
        input_ids: (B, T) int64, padded.
        attention_mask: (B, T), 0 at padding; None without padding.
        criteria: All stopping criteria.
        config: With defaults and `generate`'s own tensors of special tokens.
        target: Bounds the tokens of a sequence.

    Returns:
        Token ids of each row without padding, and the parameters of all rows. A row ends where transformers ends it, or
        later.
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
        # transformers derives positions from other values.
        if bool(((attention_mask != 0) & (attention_mask != 1)).any()):
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

"""The self-test at load: proves on the model that a decoder computes token trees as transformers computes their paths.

Two sequences with a small tree each run through the decoder, and three comparisons follow.

1. **Trees against chains.** The decoder computes every path of the trees again as a chain. An exact decoder must give
   the same bits, others in float32 nearly the same logits. This finds wrong masks, slots and positions, however
   small, in any dtype.
2. **Blocks against transformers.** Blocks of the model run on the decoder's own hidden states of every path, with the
   model's own attention (`foretoken.models.replay`). What the decoder made of the same states may differ by a small
   multiple of what transformers' own rounding explains: the difference of a block in the model's dtype and in float32.
   So models with large rounding errors pass, and errors of earlier blocks do not hide those of later ones.
3. **Ends against transformers.** Embeddings, the final norm, and some rows of the LM head.

Large models test a few blocks of every kind, so that a load takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.core.backend import is_out_of_memory
from foretoken.core.errors import ForetokenError, ModelError, foreign_errors_as, one_line
from foretoken.core.passes import Pass, Tap
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.blocks import Block
from foretoken.decoder.quantized_modules import QuantizedLinear
from foretoken.models.config import logits_shape
from foretoken.models.forward_pass import current_pass
from foretoken.models.generic import find_blocks, first_output, run_plain
from foretoken.models.lean_weights import read_weights
from foretoken.models.replay import WIDE, replay
from foretoken.models.weight_files import num_weights

if TYPE_CHECKING:
    from foretoken.decoder.base import Decoder, PassOutput
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.models.loaded import LoadedModel

_PROMPT_LENS = (2, 5)  # of two slots; different, so that a decoder that mixes up slots or lengths fails
_PARENTS = ((-1, 0, 0, 1, 2, 2), (-1, 0, 1, 1))  # two branches, the first one forks; one branch that forks late
_PATHS = (((0, 1, 3), (0, 2, 4), (0, 2, 5)), ((0, 1, 2), (0, 1, 3)))  # from the root to every leaf, all three long
_PATH_LEN = 3  # levels of both trees
NUM_ROWS = max(_PROMPT_LENS) + max(map(len, _PARENTS))  # cache rows of the self-test
_SAMPLED_WEIGHTS = 150_000_000  # of the tested blocks; a choice: unpacking them takes about a second
_ATTEMPTS = 3  # texts; one has to pass. A choice: rounding may exceed `_RATIO` once by chance, hardly three times
# A decoder's error in units of what rounding explains. Right decoders reach 2.4 in blocks of tiny models, 1.9 in four
# real ones of 0.1 to 1.5 billion weights. Planted faults give 4 and more (`tests/runner/test_planted_faults.py`).
_RATIO = 3.0
_NOT_ALONE = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)  # of blocks that cannot run alone
_HEAD_ROWS = 64  # of the beginning, the middle and the end of the LM head; a choice


class _Tolerances(NamedTuple):
    """Errors that need no explanation, relative to the compared values.

    `block`: of a block's update; `ends`: of embeddings, the final norm and logits; `same`: of logits of one decoder in
    two passes, if it is not exact.
    """

    block: float
    ends: float
    same: float

    @classmethod
    def of(cls, model: LoadedModel) -> _Tolerances:
        # Float32 reaches 4e-6. A lost mask gives at least 1e-3 on weights of scale 0.02. Inputs or KV rows of 8 bits
        # differ by a step where their values differ by rounding.
        is_wide = model.dtype in WIDE
        if _has_steps(model):
            return cls(2e-2, 2e-2 if is_wide else 5e-2, 2e-2 if is_wide else 0.15)
        return cls(2e-4, 2e-4, 2e-4) if is_wide else cls(2e-4, 2e-2, 5e-2)


def check_tree_attention(
    model: LoadedModel,
    decoder: Decoder,
    cache: SlotCache,
    *,
    context_len: int,
    with_taps: Callable[[Sequence[Tap]], Decoder] | None,
) -> None:
    """Runs the self-test; writes the first rows of the first and the last slot.

    Both slots are free; the cache has `NUM_ROWS` rows or more. `with_taps` makes another decoder of the same kind over
    the same weights and cache, with taps; None for the generic one, which runs the model's own blocks.

    Raises `ModelError` if the decoder differs from the model by more than rounding, or sliding windows are lost.
    """
    if model.context_len <= _PATH_LEN:
        raise ModelError(
            f"the context of '{model.name}' is {model.context_len} tokens. Expected at least {_PATH_LEN + 1}."
        )
    slots = [slot for slot in dict.fromkeys((cache.num_slots - 1, 0)) if cache.reserve(slot, NUM_ROWS)]
    try:
        _Test(model, decoder, cache, slots, context_len, with_taps).run()
    finally:
        for slot in slots:
            cache.trim(slot, 0)


class _Texts(NamedTuple):
    """Prompts and trees of one sequence a slot.

    All tokens are the prompts', then the trees' nodes. `paths` (P, T) says which of them are on a path from a prompt's
    beginning to a leaf; shorter paths end in repetitions, where `is_own` is False.
    """

    prompts: list[list[int]]
    trees: list[TreeRow]
    paths: Tensor
    is_own: Tensor

    @property
    def tokens(self) -> list[int]:
        return [token for each in (*self.prompts, *(tree.tokens for tree in self.trees)) for token in each]

    def nodes(self) -> tuple[Tensor, Tensor]:
        """Returns the nodes on all paths, one path after another, and which of the paths' own places are nodes."""
        places = self.paths[self.is_own] - sum(map(len, self.prompts))
        return places[places >= 0], places >= 0


def _texts(model: LoadedModel, num_slots: int, context_len: int, first_token: int) -> _Texts:
    ids = [(7 * i + first_token) % model.vocab_size for i in range(2 * NUM_ROWS)]
    prompts, trees = [], []
    for row in range(num_slots):
        own = ids[row * NUM_ROWS :]
        length = min(_PROMPT_LENS[row], context_len, model.context_len - _PATH_LEN)
        prompts.append(own[:length])
        trees.append(TreeRow(own[length : length + len(_PARENTS[row])], _PARENTS[row]))
    paths, start, first_node = [], 0, sum(map(len, prompts))
    for row, prompt in enumerate(prompts):
        paths += [[*range(start, start + len(prompt)), *(first_node + node for node in path)] for path in _PATHS[row]]
        start, first_node = start + len(prompt), first_node + len(_PARENTS[row])
    longest = max(map(len, paths))
    padded = [[*path, *[path[-1]] * (longest - len(path))] for path in paths]
    is_own = [[place < len(path) for place in range(longest)] for path in paths]
    return _Texts(prompts, trees, torch.tensor(padded), torch.tensor(is_own))


class _Test:
    def __init__(
        self,
        model: LoadedModel,
        decoder: Decoder,
        cache: SlotCache,
        slots: Sequence[int],
        context_len: int,
        with_taps: Callable[[Sequence[Tap]], Decoder] | None,
    ) -> None:
        self._model, self._decoder, self._context_len = model, decoder, context_len
        self._slots, self._rounds_rows = cache.places(slots), cache.is_rounded
        self._last_position = min(model.context_len, cache.capacity) - 1
        self._is_lean = with_taps is not None
        self._tapped = None if with_taps is None else with_taps((*range(model.num_layers + 1), "final"))
        self._allowed = _Tolerances.of(model)
        self._windows: dict[int, int | None] = {}  # of each layer, as attention got it
        if self._is_lean:
            blocks = read_weights(model, 1).layers.blocks
            self._windows = {at: block.spec.window for at, block in enumerate(blocks) if isinstance(block, Block)}

    def run(self) -> None:
        module, least = self._model.module, dict[str, Tensor]()
        has_experts = any(type(part).__name__.endswith("Experts") for part in module.modules())
        can_flip = has_experts or _has_steps(self._model) or self._model.dtype not in WIDE
        for attempt in range(_ATTEMPTS if can_flip else 1):
            texts = _texts(self._model, len(self._slots), self._context_len, 3 + 11 * attempt)
            errors = {name: each.nan_to_num(torch.inf).cpu() for name, each in self._errors(texts).items()}
            if has_experts:  # every token of a text may be at a near-tie in one block: each has to be right once
                errors = {name: torch.minimum(each, least.get(name, each)) for name, each in errors.items()}
            if all(bool((each <= 1).all()) for each in errors.values()):
                return
            least = errors
        worst = max(least, key=lambda name: float(least[name].max()))
        raise ModelError(
            f"{type(module).__name__} gives wrong logits for a token tree ({worst}: {float(least[worst].max()):.1f} "
            "times the error that rounding explains): it ignores the attention plug-in, keeps state outside the KV "
            "cache, or differs from its row in ARCHITECTURES. It cannot be used as a target."
        )

    def _errors(self, texts: _Texts) -> dict[str, Tensor]:
        """Returns errors by what was compared, each in units of what is allowed."""
        with refusing(self._model.architecture, "cannot run a batch of token trees", "It cannot be used as a target."):
            logits, states = self._computed(self._decoder, texts)
            self._check_windows()
            if bool(logits.isnan().any()):
                raise ModelError(
                    f"{type(self._model.module).__name__} gives logits that are not numbers in {self._model.dtype}. "
                    "Expected finite logits. Its weights are damaged, or the dtype is too narrow for it: load it in "
                    "float32."
                )
            errors = self._chain_errors(texts, logits)
            if self._tapped is not None:
                tapped, states = self._computed(self._tapped, texts)
                errors["a pass with features"] = self._same(tapped, logits)
        with refusing(self._model.architecture, f"cannot run {texts.paths.shape[1]} tokens", "Check its config.json."):
            if states is not None:
                try:
                    return errors | self._state_errors(texts, states, logits)
                except _NOT_ALONE:
                    if self._is_lean:
                        raise
            return errors | self._path_errors(texts, logits)

    def _computed(self, decoder: Decoder, texts: _Texts) -> tuple[Tensor, Tensor | None]:
        """Returns logits (N, V) of the trees' nodes, and states (boundaries, tokens, E) if they are known."""
        lengths, device = [len(prompt) for prompt in texts.prompts], self._model.device
        tree = TokenTree.from_rows(texts.trees, device=device)
        works = [
            Pass.of_chains(texts.prompts, slots=self._slots, prefix_lens=[0] * len(lengths), device=device),
            Pass.of_tree(tree, slots=self._slots, prefix_lens=lengths, last_position=self._last_position),
        ]
        found = [self._observed(decoder, work) for work in works]
        logits = found[-1][0].logits
        assert logits is not None, "a verification gives all logits"
        known = [states for _, states in found if states is not None]
        return _comparable(logits), torch.cat(known, dim=1) if len(known) == len(works) else None

    def _observed(self, decoder: Decoder, work: Pass) -> tuple[PassOutput, Tensor | None]:
        """Runs a pass; returns states (boundaries, tokens, E) of a decoder with taps, or of the module's blocks."""
        if self._is_lean:
            output = decoder.run(work)
            return output, None if output.features is None else output.features.transpose(0, 1)
        states: list[Tensor] = []
        handles = [self._model.module.register_forward_hook(self._keep_windows)]
        try:
            blocks = list(find_blocks(self._model.module, self._model.num_layers))
        except ModelError:
            blocks = []
        for block in blocks:
            handles.append(block.register_forward_pre_hook(_keep_input(states), with_kwargs=True))
        for block in blocks[-1:]:
            handles.append(block.register_forward_hook(lambda *event: states.append(first_output(event[2])[0])))
        try:
            output = decoder.run(work)
        finally:
            for handle in handles:
                handle.remove()
        return output, torch.stack(states) if states else None

    def _keep_windows(self, *_: Any) -> None:
        forward_pass = current_pass()
        if forward_pass is not None:
            self._windows.update(forward_pass.windows)

    def _chain_errors(self, texts: _Texts, logits: Tensor) -> dict[str, Tensor]:
        """Compares trees with their paths, each computed as a chain behind the same prompt by the same decoder."""
        if not self._decoder.is_exact and self._model.dtype not in WIDE:
            return {}  # a chain of another width rounds differently, and errors add up over blocks
        first = sum(map(len, texts.prompts))
        tokens = texts.tokens
        nodes = [row[own][-_PATH_LEN:] for row, own in zip(texts.paths, texts.is_own, strict=True)]
        by_slot = [nodes[: len(_PATHS[0])], nodes[len(_PATHS[0]) :]][: len(self._slots)]
        errors = []
        for index in range(len(_PATHS[0])):
            chains = [own[min(index, len(own) - 1)].tolist() for own in by_slot]
            work = Pass.of_chains(
                [[tokens[place] for place in chain] for chain in chains], slots=self._slots,
                prefix_lens=[len(prompt) for prompt in texts.prompts], device=self._model.device,
            )  # fmt: skip
            again = self._decoder.run(work.with_all_logits()).logits
            assert again is not None, "a verification gives all logits"
            same = torch.tensor([place - first for chain in chains for place in chain], device=logits.device)
            errors.append(self._same(_comparable(again), logits[same]))
        return {"a path as a chain": torch.cat(errors)}

    def _same(self, ours: Tensor, theirs: Tensor) -> Tensor:
        if self._decoder.is_exact:
            return torch.zeros(len(ours)).masked_fill((ours != theirs).any(-1).cpu(), torch.inf)
        return _relative(ours, theirs).cpu() / self._allowed.same

    def _state_errors(self, texts: _Texts, states: Tensor, logits: Tensor) -> dict[str, Tensor]:
        """Compares the states of every path, (boundaries, P, T, E), with what the model makes of them."""
        model, count = self._model, self._model.num_layers
        places, own = texts.paths.to(states.device), texts.is_own.to(states.device)
        states = states[:, places]
        made = replay(
            model, torch.tensor(texts.tokens)[texts.paths], list(states[: count + 1]), sampled_blocks(model),
            rounds_rows=self._rounds_rows,
        )  # fmt: skip
        errors = {"embeddings": (_relative(states[0], made.embeddings) / self._allowed.ends)[own]}
        for index, (exact, usual) in made.blocks.items():
            if bool(exact[own].isnan().any()) and bool(states[index + 1][own].isfinite().all()):
                raise ModelError(self._not_numbers(index))
            # Medians, as the rounding of a few large channels would hide errors of all others.
            update, error, explained = (
                difference.abs().median(-1).values[own]
                for difference in (exact - states[index], states[index + 1] - exact, usual - exact)
            )
            explained = torch.maximum(explained, explained.median())
            allowed = torch.maximum(_RATIO * explained, self._allowed.block * update)
            errors[f"block {index}"] = error / allowed.clamp_min(torch.finfo(exact.dtype).tiny)
        if self._is_lean:
            errors["the final norm"] = (_relative(states[-1], made.final) / self._allowed.ends)[own]
            node, is_node = texts.nodes()
            ids, expected = self._head_logits(states[-1][own][is_node.to(own.device)])
            errors["the LM head"] = _relative(logits[node.to(logits.device)][:, ids], expected) / self._allowed.ends
        return errors

    def _not_numbers(self, index: int) -> str:
        block = find_blocks(self._model.module, self._model.num_layers)[index]
        rates = [float(each.max()) for name, each in block.named_parameters() if name.endswith("A_log")]
        cause = f" Its largest A_log is {max(rates):g}, and exp(A_log) overflows there." if rates else ""
        return (
            f"block {index} of '{self._model.name}' gives values that are not numbers where transformers reads several "
            f"tokens at once, and numbers where {self._decoder.name} reads them one by one.{cause} Expected finite "
            "values in both. Check the weights of that block, or download them again."
        )

    def _head_logits(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """Returns some tokens, and their logits for states (..., E) after the final norm."""
        module: Any = self._model.module
        head: Any = module.get_output_embeddings()
        wide, count = final.to(torch.promote_types(final.dtype, torch.float32)), head.out_features
        # Matrices in integers have panels of 16 rows.
        starts = {0, count // 2 // 16 * 16, max(0, count - _HEAD_ROWS) // 16 * 16}
        parts, ids = list[Tensor](), list[int]()
        for start in sorted(starts):
            rows = slice(start, min(start + _HEAD_ROWS, count))
            if isinstance(head, QuantizedLinear):
                part = head.matrix.rows(rows.start, rows.stop).product(wide)
            else:
                part = functional.linear(wide, head.weight.detach()[rows].to(wide.dtype))
            parts.append(part if head.bias is None else part + head.bias.detach()[rows].to(wide.dtype))
            ids += range(rows.start, rows.stop)
        scale, cap = logits_shape(self._model.config)
        logits = torch.cat(parts, -1) * scale
        return torch.tensor(ids, device=final.device), logits if cap is None else torch.tanh(logits / cap) * cap

    def _path_errors(self, texts: _Texts, logits: Tensor) -> dict[str, Tensor]:
        """Compares logits with whole forwards, where the model's blocks cannot be found or run alone."""
        paths = torch.tensor(texts.tokens)[texts.paths]
        theirs = _comparable(run_plain(self._model.module, paths).logits.float())[texts.is_own.to(logits.device)]
        node, is_node = texts.nodes()
        return {"a path": _relative(logits[node.to(logits.device)], theirs[is_node]) / self._allowed.same}

    def _check_windows(self) -> None:
        """Checks that every sliding layer has its window: test trees are too short to show a long one."""
        config: Any = self._model.config
        seen = self._windows
        layer_types = getattr(config, "layer_types", None)
        if layer_types is not None:
            lost = [i for i, kind in enumerate(layer_types) if kind == "sliding_attention" and seen.get(i) is None]
        else:
            # Without layer types a window is for every layer, unless `use_sliding_window` is false.
            window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
            is_lost = window is not None and window < self._context_len and not any(seen.values())
            lost = list(seen) if is_lost else []
        if lost:
            raise ModelError(
                f"layers {lost} of {type(self._model.module).__name__} slide a window but do not say which to the "
                "attention function. It cannot be used as a target."
            )


def _keep_input(states: list[Tensor]) -> Callable[[Any, Any, Any], None]:
    def hook(_: Any, args: Any, kwargs: Any) -> None:
        states.append((args[0] if args else kwargs["hidden_states"])[0])

    return hook


def sampled_blocks(model: LoadedModel) -> list[int]:
    """Returns the blocks that are tested, ascending: the first of every kind, and evenly more while they are small."""
    blocks = find_blocks(model.module, model.num_layers)
    values = model.config.to_dict().values()
    by_layer = [each for each in values if isinstance(each, (list, tuple)) and len(each) == len(blocks)]
    kinds: dict[tuple[str, ...], int] = {}
    for index, block in enumerate(blocks):
        kinds.setdefault((repr(block), *(str(each[index]) for each in by_layer)), index)
    more = max(0, _SAMPLED_WEIGHTS // max(map(num_weights, blocks)) - len(kinds))
    if more >= len(blocks):
        return list(range(len(blocks)))
    return sorted({*kinds.values(), *(round((step + 1) * (len(blocks) - 1) / more) for step in range(more))})


def _has_steps(model: LoadedModel) -> bool:
    """Decides whether passes round inputs of matrices or KV rows to 8 bits."""
    return model.kv_cache_dtype == "int8" or any(
        isinstance(part, QuantizedLinear) and part.matrix.input_bits == 8 for part in model.module.modules()
    )


def _comparable(logits: Tensor) -> Tensor:
    """Drops entries of about -inf, by which a model forbids tokens: their norm would hide all others."""
    return logits.masked_fill(logits < -1e4, 0.0)


def _relative(ours: Tensor, theirs: Tensor) -> Tensor:
    wide = theirs.to(torch.promote_types(theirs.dtype, torch.float32))
    errors: Tensor = (ours - wide).norm(dim=-1) / wide.norm(dim=-1).clamp_min(1e-9)
    return errors


def refusing(architecture: str, what: str, advice: str) -> AbstractContextManager[None]:
    """Returns a context in which foreign errors become a `ModelError`: the architecture, `what`, why, and `advice`.

    Failed allocations pass.
    """

    def told(err: Exception) -> str:
        if is_out_of_memory(err):
            raise err
        return f"{architecture} {what} ({one_line(err)}). {advice}"

    return foreign_errors_as(ModelError, told, passing=(ForetokenError,))

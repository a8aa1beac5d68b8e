"""`foretoken plan`: what speculation would gain on this machine or a described one, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.terminal import ProgressBar
from foretoken.core.errors import ConfigError
from foretoken.files.atomic_files import write_file

if TYPE_CHECKING:
    from foretoken.bench.workload import Workload
    from foretoken.models.recurrent import RecurrentSizes
    from foretoken.planning.acceptance import Curve
    from foretoken.planning.plan import Page, Plan, Prediction

_BATCHES = (1, 4, 8, 16)
_CONTEXT = 1024  # tokens of a sequence on a described machine; a choice
_SHOWN = 3  # drafters of each batch in the table without --wide
_PROMPTS = options.PromptOptions(max_tokens=96)


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """A described machine; this one if nothing is given."""

    bandwidth: Annotated[float | None, typer.Option(help="Describe a machine: memory bandwidth, GB/s.")] = None
    flops: Annotated[float | None, typer.Option(help="Arithmetic in the model's dtype, TFLOP/s.")] = None
    memory: Annotated[float | None, typer.Option(help="Memory for weights and KV cache, GiB.")] = None
    host_ms: Annotated[float | None, typer.Option(help="Milliseconds of the host in an iteration. Default: 1.")] = None

    def is_described(self, quantization: str | None, *, measure: bool) -> bool:
        """Decides whether a machine is described; raises `ConfigError` for options that do not fit."""
        missing = [name for name in ("bandwidth", "flops", "memory") if getattr(self, name) is None]
        if 0 < len(missing) < 3:
            raise ConfigError(
                f"--{missing[0]} is missing. A described machine needs --bandwidth, --flops and --memory."
            )
        if not missing and measure:
            raise ConfigError("--measure runs on this machine, and another one is described. Pass one of them.")
        if not missing and quantization is not None:
            raise ConfigError(
                "--quantization is timed on this machine, and another one is described. For fewer bytes a weight "
                "there, pass a checkpoint that is stored so."
            )
        return not missing


def plan(
    model: Annotated[
        str,
        typer.Argument(
            parser=options.local_path,
            help="Target, as `foretoken bench` takes it; a described machine needs only its config.json.",
        ),
    ],
    speculative_config: Annotated[
        list[str] | None,
        options.drafter_option(
            help="Plan with this drafter, as `foretoken bench` takes it. May be repeated. Default: ngram, all "
            "beside MODEL, with --measure its own head, and with a described machine all of the library."
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure acceptance in a short run on prompts; else the library's is used."),
    ] = False,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DRAFTER=PATH",
            help="Acceptance of a drafter from a file: InferenceX's golden acceptance "
            "lengths, or AIConfigurator's nextn and nextn_accepted. May be repeated.",
        ),
    ] = None,
    save_acceptance: Annotated[
        Path | None, typer.Option(help="File to make: the acceptance of chains as golden acceptance lengths, YAML.")
    ] = None,
    *,
    machine: MachineOptions,
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences decoded at once; may be repeated. Default: 1, 4, 8, 16.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence. Default: of the prompts with half of the output.")
    ] = None,
    asked: Annotated[options.PromptOptions, ("temperature", "prompts", "num_prompts", "max_tokens")] = _PROMPTS,
    seed: options.Seed = 0,
    loading: Annotated[options.LoadOptions, ("dtype", "quantization", "device", "runner", "threads")],
    out: Annotated[Path | None, typer.Option(help="Picture to make, .svg or .png: speed-up by batch.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files of --out and --save-acceptance.")] = False,
    wide: options.Wide = False,
    as_json: options.AsJson = False,
) -> None:
    """Predict what speculation gains, before anything is trained or bought.

    The machine is measured (passes by width, drafts of existing drafters, the host), or described by --bandwidth,
    --flops and --memory. Acceptance comes from --measure, from --acceptance, or from the library of measured and
    published curves, where figures of other models and texts have wide intervals.

    For every batch the command names the fastest drafter and depth, the second, and the reason; or it says that no
    drafter pays, or that the intervals do not decide. It also says from which batch and context on nothing pays,
    what memory is needed, and how long a head trains. Intervals hold four of five figures.
    """
    from foretoken.planning.acceptance import golden_yaml, library, read_curves
    from foretoken.planning.picture import check_picture, write_picture
    from foretoken.planning.plan import make_plan

    for path, option in ((out, "--out"), (save_acceptance, "--save-acceptance")):
        if path is not None:
            options.check_new_file(path, option, force=force)
    check_picture(out)
    is_described = machine.is_described(loading.quantization, measure=measure)
    given = [curve for text in acceptance or () for curve in read_curves(*_split(text))]
    asked = replace(asked, temperature=list(dict.fromkeys(asked.temperature or [0.0, 0.8])))
    batches = sorted(set(batch_size or _BATCHES))
    setups = _setups(speculative_config, model, must_exist=measure)
    replaced = {curve.name for curve in given}
    names = [*dict.fromkeys(curve.name for curve in library())]
    if speculative_config and not measure and not {*names, *replaced} & {*setups, *replaced}:
        raise ConfigError(
            f"the acceptance of {', '.join(setups)} is not known. Pass --measure, --acceptance DRAFTER=PATH, or one of "
            f"the library: {', '.join(names)}."
        )
    found: list[Curve] = []
    if is_described:
        planned, header = _described(model, loading.dtype, asked.temperature or (), machine, context)
    else:
        workload = partial(asked.workload, asked.rows(), seed=seed)
        found, planned, header = _measured(model, loading, setups, workload, batches, context, measure=measure)
    if planned["target"].recurrent is not None:
        _check_recurrent({*setups, *replaced}, model)
    stored = library(planned["target"].weights)
    known = [*found, *(curve for curve in stored if curve.name not in {each.name for each in found})]
    curves = [*given, *(curve for curve in known if curve.name not in replaced)]
    if speculative_config:
        curves = [curve for curve in curves if curve.name in setups or curve.name in replaced]
    result = make_plan(curves, batches=batches, **planned)
    if save_acceptance is not None:
        own = [curve for curves in result.curves.values() for curve in curves]
        conditions = "\n".join(f"{key}: {value}" for key, value in header.items())
        write_file(save_acceptance, golden_yaml(own, Path(model).name, conditions))
    if out is not None:
        write_picture(result, out, " ".join(f"{key}={value}" for key, value in header.items() if key != "command"))
    if as_json:
        options.print_json({**header, **result.as_dict()})
    else:
        _print(result, header, wide=wide)


def _setups(given: list[str] | None, model: str, *, must_exist: bool) -> dict[str, Mapping[str, Any] | None]:
    """Returns configurations by the names of curves: those of -s, or prompt lookup and all drafters beside the model.

    The configuration of a drafter that does not exist is None, unless it must exist.

    Raises:
        ConfigError: If a drafter must exist and does not, or several are merged into one tree.
    """
    from foretoken.entrypoints.config import parse_setup, parse_speculative_config
    from foretoken.entrypoints.drafter_files import head_beside, names_beside
    from foretoken.formats.registry import MODELS_OWN, holds_own_head

    names = ["draft_model" if name == "draft" else name for name in names_beside(model)]
    beside = [f"{name}:chain" for name in names if name == "draft_model" or head_beside(model, name)]
    beside += [f"{MODELS_OWN}:chain"] if must_exist and holds_own_head(Path(model), MODELS_OWN) else []
    setups: dict[str, Mapping[str, Any] | None] = {}
    for text in given or ["ngram:chain", *beside]:
        setup = parse_setup(text, target=model)
        if setup.config is None:
            continue
        if "drafters" in setup.config or not isinstance(setup.config.get("tree", ""), str):
            raise ConfigError(f"'{text}' is several drafters or a tree without a name. Expected one, as hass:chain.")
        name, config = setup.name.split()[0], setup.config
        try:
            (drafter,) = parse_speculative_config(config, target=model).options
        except ConfigError:
            if must_exist:
                raise
            setups[name if ":" in name else f"{name}:chain"] = None
        else:
            setups[f"{name.partition(':')[0]}:{drafter.tree}"] = config
    return setups


def _check_recurrent(setups: Iterable[str], model: str) -> None:
    """Raises `ConfigError` for a drafter that a target with recurrent layers does not have."""
    from foretoken.drafters.registry import is_method, options_of
    from foretoken.drafters.self_drafts import SelfOptions, recurrent_refusal

    for setup in setups:
        method = setup.partition(":")[0]
        if is_method(method) and issubclass(options_of(method), SelfOptions):
            raise ConfigError(f"'{setup}' cannot draft for it: {recurrent_refusal(model)}")


def _described(
    model: str, dtype: str, temperatures: Sequence[float], described: MachineOptions, context: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of `make_plan` for a described machine, and the conditions."""
    from foretoken.planning.costs import HOST_S, RooflineCosts, nominal_machine
    from foretoken.planning.sizes import described_sizes

    target, most = described_sizes(model, dtype)
    bandwidth, flops, memory = described.bandwidth or 0.0, described.flops or 0.0, described.memory or 0.0
    machine = nominal_machine(bandwidth * 1e9, flops * 1e12, memory * 2**30)
    host = HOST_S if described.host_ms is None else described.host_ms / 1e3
    costs = RooflineCosts(target=target, machine=machine, host_s=host)
    header = {
        "model": model, "bandwidth": f"{bandwidth:g}GB/s", "flops": f"{flops:g}TFLOP/s", "memory": f"{memory:g}GiB",
        "host_ms": host * 1e3, "bytes_per_weight": target.weight_bytes,
    }  # fmt: skip
    planned = {
        "costs": dict.fromkeys(temperatures, costs), "target": target,
        "context": _fitting(context, most, model) or min(_CONTEXT, most),
        "longest": most, "memory_bytes": machine.memory_bytes, "peak_flops": flops * 1e12
    }  # fmt: skip
    return planned, header


def _measured(
    model: str, loading: options.LoadOptions, setups: Mapping[str, Mapping[str, Any] | None],
    make_workload: Callable[..., Workload], batches: Sequence[int], context: int | None, *, measure: bool,
) -> tuple[list[Curve], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Returns measured curves, the arguments of `make_plan` for this machine, and the conditions."""
    from foretoken.bench.compare import processor_name
    from foretoken.decoder.slot_cache import share_of_free
    from foretoken.planning import measure as measuring

    (loaded, tokenizer), runner = loading.load(model), loading.runner
    workload = make_workload(loaded, tokenizer, runner=runner)
    context = _fitting(context, loaded.context_len, model)
    with ProgressBar("prompts") as on_progress:
        found = measuring.measure(
            loaded, tokenizer, {name: config for name, config in setups.items() if config is not None}, workload,
            batches=batches, has_acceptance=measure, runner=runner, on_progress=on_progress,
        )  # fmt: skip
    header = options.run_header(
        loaded, runner=found.runner, processor=processor_name(), prompts=len(workload.prompts),
        max_tokens=workload.max_tokens, seed=workload.seed, command=options.command_line(),
    )  # fmt: skip
    costs = next(iter(found.costs.values()))
    planned = {
        "costs": found.costs, "target": costs.target, "context": context or found.context,
        "longest": loaded.context_len, "memory_bytes": costs.target.weights_bytes + share_of_free(loaded.device),
        "peak_flops": costs.flops_per_s
    }  # fmt: skip
    return found.curves, planned, header


def _fitting(context: int | None, most: int, model: str) -> int | None:
    if context is not None and context > most:
        raise ConfigError(f"--context is {context}, but '{model}' has a context of {most}. Expected at most that.")
    return context


def _split(text: str) -> tuple[Path, str]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise ConfigError(f"--acceptance is '{text}'. Expected DRAFTER=PATH, as eagle3:chain=lengths.yaml.")
    return Path(path), name if ":" in name else f"{name}:chain"


def _print(plan: Plan, header: Mapping[str, Any], *, wide: bool) -> None:
    """Prints a table and the advice for each temperature, then memory and training."""
    terminal.conditions({key: value for key, value in header.items() if key != "command"})
    for page in plan.pages:
        _print_page(page, plan, wide=wide)
    gib, mib = 1 << 30, 1 << 20
    room = "" if plan.most_sequences is None else f"; {plan.most_sequences} such sequences fit"
    terminal.prose(
        f"memory: weights {plan.weight_bytes / gib:.2f} GiB, KV cache {plan.kv_bytes / mib:.1f} MiB for a sequence of "
        f"{plan.context:.0f} tokens{_states(plan.recurrent)}{room}"
    )
    rows = [
        [need.name, f"{need.weight_bytes / mib:.0f}", "" if need.training_s is None else _duration(need.training_s)]
        for need in plan.needs
    ]
    if rows:
        terminal.print_table(["drafter of the usual size", "MiB of its own", "training"], rows)


def _states(sizes: RecurrentSizes | None) -> str:
    if sizes is None:
        return ""
    mib = 1 << 20
    return (
        f" in {sizes.attention_layers} layers with attention; {sizes.layers} recurrent layers: states of "
        f"{sizes.state_bytes / mib:.1f} MiB and windows of {sizes.window_bytes / mib:.2f} MiB for a sequence of any "
        f"length, {sizes.node_bytes / mib:.2f} MiB for a node of a tree"
    )


def _print_page(page: Page, plan: Plan, *, wide: bool) -> None:
    from foretoken.planning.plan import best_depths

    rows = [
        _row(each)
        for found in page.predictions
        for number, each in enumerate(best_depths(found))
        if wide or number < _SHOWN or not each.draft.depth
    ]
    columns = ["drafter", "batch", "depth", "nodes", "tau", "tokens/s", "80 % interval", "speed-up", "ms/token"]
    terminal.print_table(columns, rows, title=f"temperature {page.temperature:g}, predicted", num_keys=2)
    for advice in page.advice:
        if advice.best is None:
            terminal.prose(f"batch {advice.batch}: {advice.verdict}. {advice.reason}")
            continue
        second = "" if advice.second is None else f" Second: {advice.second.setup}, {advice.second.speed_up:.2f}x."
        terminal.prose(
            f"batch {advice.batch}: take {advice.best.setup}, {advice.best.speed_up:.2f}x.{second} {advice.reason}"
        )
    if page.pays:
        batch = f"up to {plan.limits.batch}" if page.last_batch is None else f"below {page.last_batch}"
        context = f"up to {plan.limits.context}" if page.last_context is None else f"below {page.last_context}"
        terminal.prose(
            f"drafting pays at batches {batch} with {plan.context:.0f} tokens of context, and at contexts {context} "
            "with the smallest batch"
        )


def _row(each: Prediction) -> list[str]:
    return [
        each.draft.name,
        str(each.batch),
        str(each.draft.depth),
        f"{each.draft.nodes:.1f}",
        f"{each.draft.tokens:.2f}",
        f"{each.tokens_per_s:.1f}",
        f"{each.low:.1f}-{each.high:.1f}",
        f"{each.speed_up:.2f}",
        f"{each.ms_per_token:.2f}",
    ]


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"

"""The command `miles-top`. Imports nothing heavy: an engine is imported in the process that runs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from .exit_codes import EXACT, INTERRUPTED, REFUSED
from .launch.flags import with_launch_flags
from .matrix import Matrix
from .plan import VerifyRequest

# typer carries its own copy of click from 0.27 on, so the base class is found from the public one.
USAGE_ERROR: type[BaseException] = typer.BadParameter.__mro__[1]

FIELD = "FIELD=VALUE"


class OneLineErrors(TyperGroup):
    """A command group that tells a wrong flag in one line instead of a usage page."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command; a usage error goes to standard error and exits 2."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except USAGE_ERROR as error:
            typer.echo(f"refused: {_usage_line(error)}", err=True)
            raise SystemExit(REFUSED) from None
        except typer.Abort:
            typer.echo("interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None
        raise SystemExit(code if isinstance(code, int) else EXACT)


def _usage_line(error: Any) -> str:
    return " ".join(str(error.format_message()).split())


app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="True on-policy: the rollout's and the trainer's log-probs as the same 32 bits.",
)


@app.callback(invoke_without_command=True)
def miles_top(context: typer.Context) -> None:
    """True on-policy: the rollout's and the trainer's log-probs as the same 32 bits."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(REFUSED)


Model = Annotated[
    str,
    typer.Option(
        help="A Hugging Face model folder; `tiny` builds one (of the family of --contract), `random-qwen3-0.6b` and "
        "`random-qwen3-4b` build their shapes with random weights as training leaves them, with `-initial` as it finds "
        "them.",
        metavar="DIR|tiny",
    ),
]
Contract = Annotated[str | None, typer.Option(help="Contract; the model's own when not given.", metavar="NAME")]
RolloutTp = Annotated[int | None, typer.Option(help="Tensor-parallel ranks of SGLang.", show_default="1")]
TrainTp = Annotated[int | None, typer.Option(help="Tensor-parallel ranks of the trainer.", show_default="1")]
Pp = Annotated[int | None, typer.Option(help="Pipeline stages of the trainer.", show_default="1")]
Cp = Annotated[int | None, typer.Option(help="Ulysses context-parallel ranks of the trainer.", show_default="1")]
Dp = Annotated[int | None, typer.Option(help="Data-parallel ranks of the trainer.", show_default="1")]
CpLayout = Annotated[Literal["zigzag", "contiguous"], typer.Option(help="How context-parallel input is cut.")]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with input_ids, prompt or messages; drawn from the seed when not given.", metavar="FILE.jsonl"
    ),
]
NumPrompts = Annotated[int | None, typer.Option(help="How many prompts.", show_default="all of the file, or 34")]
PromptTokens = Annotated[
    int | None, typer.Option(help="Tokens of a drawn prompt, an eighth more or less.", show_default="1 to 48")
]
MaxNewTokens = Annotated[int, typer.Option(help="Response tokens a prompt.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
Seed = Annotated[int, typer.Option(help="Seed of the prompts and of each request.")]
Dtype = Annotated[Literal["bfloat16", "float32"], typer.Option(help="Type of weights and activations.")]
Sglang = Annotated[
    list[str] | None,
    typer.Option(help="A server argument of SGLang, e.g. chunked_prefill_size=16; again for more.", metavar=FIELD),
]
Sampling = Annotated[
    list[str] | None, typer.Option(help="A sampling parameter of every request; again for more.", metavar=FIELD)
]
Megatron = Annotated[
    list[str] | None, typer.Option(help="A field of Megatron's TransformerConfig; again for more.", metavar=FIELD)
]
KernelSet = Annotated[
    Literal["cpu", "hopper"], typer.Option(help="Kernels of both engines: cpu runs anywhere, hopper on H100 and H200.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write what was found there.", metavar="OUT")]


def _run(
    model: Model = "tiny",
    contract: Contract = None,
    rollout_tp: RolloutTp = None,
    train_tp: TrainTp = None,
    pp: Pp = None,
    cp: Cp = None,
    dp: Dp = None,
    cp_layout: CpLayout = "zigzag",
    prompts: Prompts = None,
    num_prompts: NumPrompts = None,
    prompt_tokens: PromptTokens = None,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    dtype: Dtype = "bfloat16",
    kernel_set: KernelSet = "cpu",
    sglang: Sglang = None,
    sampling: Sampling = None,
    megatron: Megatron = None,
) -> VerifyRequest:
    """What every command that plans a run takes."""
    return VerifyRequest(
        model=model,
        contract=contract,
        rollout_tp=rollout_tp,
        train_tp=train_tp,
        pp=pp,
        cp=cp,
        dp=dp,
        cp_layout=cp_layout,
        prompts=prompts,
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        dtype=dtype,
        kernel_set=kernel_set,
        sglang=tuple(sglang or ()),
        sampling=tuple(sampling or ()),
        megatron=tuple(megatron or ()),
    )


def with_run(command: Callable[..., int]) -> Callable[..., int]:
    """The command as typer reads it: the flags of :func:`_run` in place of its first parameter, a VerifyRequest."""
    flags = inspect.signature(_run, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    @wraps(command)
    def whole(**given: Any) -> int:
        return command(_run(**{name: given.pop(name) for name in flags}), **given)

    parameters = [*flags.values(), *own]
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    whole.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    return whole


@app.command()
@with_run
def verify(
    run: VerifyRequest,
    matrix: Annotated[
        Matrix | None,
        typer.Option(help="Many layouts in one run: two is the 10 of two GPUs, small 18, full 27 on four models."),
    ] = None,
    json: Json = None,
) -> int:
    """Start both real engines, compare every response log-prob bit by bit, and show the control beside it.

    Exit code 0: exact. 1: something differs. 2: refused or bad input.
    """
    from .command import run_verify

    return run_verify(replace(run, matrix=matrix, json=json))


@app.command()
@with_run
def diff(
    run: VerifyRequest,
    dumps: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Two dump folders, the rollout's and the trainer's; none runs both engines.",
            metavar="[ROLLOUT TRAINER]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Keep the dumps there.", metavar="DIR", show_default="kept only if they differ"),
    ] = None,
    values_limit: Annotated[
        float, typer.Option(help="GiB of values that a process keeps on disk while it runs; digests are always kept.")
    ] = 4.0,
    json: Json = None,
) -> int:
    """Name the first operation whose result differs between both engines, of a run or of two dumps.

    Exit code 0: equal at every point. 1: diverged. 2: inconclusive, refused or bad input.
    """
    from .diff.command import DiffRequest, run_diff

    return run_diff(DiffRequest(dumps=tuple(dumps or ()), run=run, out=out, values_limit=values_limit, json=json))


@app.command()
def soak(
    rounds: Annotated[int, typer.Option(help="Rounds of sampling, scoring, training and updating.")] = 200,
    update: Annotated[
        Literal["tensors", "disk"], typer.Option(help="How weights reach the running engine.")
    ] = "tensors",
    model: Model = "tiny",
    contract: Contract = None,
    rollout_tp: RolloutTp = None,
    train_tp: TrainTp = None,
    pp: Pp = None,
    cp: Cp = None,
    dp: Dp = None,
    seed: Annotated[int, typer.Option(help="Seed of the request mixes.")] = 0,
    json: Json = None,
) -> int:
    """Many rounds on both engines, random requests, a weight update after each: every token compared, growth watched.

    Exit code 0: nothing differs and nothing grows. 1: something does. 2: refused or bad input.
    """
    from .soak.command import SoakRequest, run_soak
    from .soak.mixes import LONGEST_RESPONSE

    run = VerifyRequest(
        model=model,
        contract=contract,
        rollout_tp=rollout_tp,
        train_tp=train_tp,
        pp=pp,
        cp=cp,
        dp=dp,
        seed=seed,
        max_new_tokens=LONGEST_RESPONSE,
    )
    return run_soak(SoakRequest(run=run, rounds=rounds, update=update, json=json))


@app.command()
def doctor(
    contract: Annotated[
        str | None, typer.Option(help="Contract; the built-in one when not given.", metavar="NAME")
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where to run; what the machine has when not given.")
    ] = None,
    json: Json = None,
) -> int:
    """Check the machine and every installed part against the contract, one line each, and say what mends it.

    Exit code 0: nothing is red. 1: something is. 2: refused or bad input.
    """
    from .doctor.command import DoctorRequest, run_doctor

    return run_doctor(DoctorRequest(contract=contract, device=device, json=json))


@app.command()
@with_launch_flags
def plan(
    given: dict[str, Any],
    recommended: Annotated[
        bool,
        typer.Option("--recommended", help="The model's one configuration of its profile; says whether it has run."),
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="These flags by name; one given twice must be the same.", metavar="FILE.yaml")
    ] = None,
    format_: Annotated[
        Literal["text", "shell", "json", "yaml"], typer.Option("--format", help="How the plan is written.")
    ] = "text",
    output: Annotated[Path | None, typer.Option(help="Write it there instead of printing it.", metavar="FILE")] = None,
) -> int:
    """Print all that a launch needs: SGLang, Megatron and Miles arguments, environment, memory of a GPU, receipts.

    Nothing is started, and no weights are needed. Exit code 0: planned. 2: refused or bad input.

    miles-top plan --model Qwen/Qwen3-4B --recommended

    miles-top plan --model Qwen/Qwen3-8B --nodes 2 --tensor-model-parallel-size 4 --rollout-num-gpus-per-engine 2
    """
    from .launch.command import PlanRequest, run_plan

    return run_plan(PlanRequest(given=given, config=config, recommended=recommended, format=format_, output=output))

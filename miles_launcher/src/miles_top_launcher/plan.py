"""From flags to one typed object: flags, prompts, folder, layout, environment, checked before an engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ._contract.schema.contract import TrueOnPolicyContract
from ._contract.schema.layout import CpLayout, Layout, RolloutLayout, TrainLayout, check_layout
from ._contract.schema.policy import KernelSetName
from ._contract.schema.registry import load_contract
from ._contract.schema.temperature import check_temperature
from .environment import check_environment
from .matrix import Matrix, matrix_layouts
from .model_folder import ModelFolder, check_shape_for, check_weights, pick_contract, read_folder
from .options import EngineOptions, check, parse
from .preflight import check_device, check_installed
from .problems import BadInput, is_folder
from .profiles.recognise import published_name
from .prompts import check_lengths, draw_prompts, read_prompts
from .random_model import FULL_MODELS, RANDOM_MODELS, SMALL_MODELS, RandomModel, build, of_contract
from .samples import scored_at

Dtype = Literal["bfloat16", "float32"]

TINY = "tiny"
DEFAULT_PROMPTS = 34
MAX_PROMPTS = 1_000_000
MAX_PROMPT_TOKENS = 1_000_000
# Of models that fill a GPU, the controls sample this many.
CONTROL_PROMPTS = 8
# All processes of a run share this machine; beyond this, a number was mistyped.
MAX_RANKS = 64
MAX_SEED = 2**31 - 1
# Both engines load the same folder once, so a run knows one version of the weights.
WEIGHT_VERSION = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """The flags of `miles-top verify`, as given; None means that a flag was not given."""

    model: str = TINY
    contract: str | None = None
    rollout_tp: int | None = None
    train_tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    cp_layout: CpLayout = "zigzag"
    prompts: Path | None = None
    num_prompts: int | None = None
    prompt_tokens: int | None = None
    max_new_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    dtype: Dtype = "bfloat16"
    kernel_set: KernelSetName = "cpu"
    matrix: Matrix | None = None
    sglang: tuple[str, ...] = ()
    sampling: tuple[str, ...] = ()
    megatron: tuple[str, ...] = ()
    json: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A checked run: which models, which layouts, which prompts. Only this object travels on.

    `to_build` are the models still to be written into the folders of `models` (none for a person's own folder).
    `temperature` 0 is greedy; a request's seed is `seed` plus its index. `options` win over those that
    a run chooses by itself, all of them neutral; `rollout_environment` are further variables of the rollout's
    processes.
    """

    contract: TrueOnPolicyContract
    kernel_set: str
    device: str
    dtype: Dtype
    models: tuple[ModelFolder, ...]
    to_build: tuple[RandomModel, ...]
    layouts: tuple[Layout, ...]
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    temperature: float
    seed: int
    report: Path | None
    options: EngineOptions = field(default_factory=EngineOptions)
    rollout_environment: Mapping[str, str] = field(default_factory=dict)

    def build_models(self) -> None:
        """Write the random models into their folders."""
        for folder, model in zip(self.models, self.to_build, strict=False):
            build(model, folder.path)

    @property
    def control_count(self) -> int:
        """How many prompts, from the first on, the controls take: one sequence at a time is slow for a large model."""
        return len(self.prompts) if self.device == "cpu" else min(len(self.prompts), CONTROL_PROMPTS)

    @property
    def scoring_temperature(self) -> float:
        """The temperature log-probs are scored at."""
        return scored_at(self.temperature)

    @property
    def rollout_tps(self) -> tuple[int, ...]:
        """Every rollout TP of the run, in order."""
        return tuple(dict.fromkeys(layout.rollout.tp for layout in self.layouts))

    @property
    def train_layouts(self) -> tuple[TrainLayout, ...]:
        """Every train layout of the run, in order."""
        return tuple(dict.fromkeys(layout.train for layout in self.layouts))

    @property
    def trainer_ranks(self) -> int:
        """Trainer processes that the largest layout needs."""
        return max(train.world_size for train in self.train_layouts)


def make_plan(request: VerifyRequest, workspace: Path) -> LaunchPlan:
    """Check every flag and return the plan; random models get folders under `workspace`, not written yet.

    Raises Refusal (BadInput and the schema's own), one line each.
    """
    _check_numbers(request)
    layouts = _layouts(request)
    options = EngineOptions(
        parse("--sglang", request.sglang), parse("--sampling", request.sampling), parse("--megatron", request.megatron)
    )
    to_build = _random_models(request)
    if request.model == TINY and request.contract is not None:
        named = load_contract(request.contract)
        to_build = tuple(of_contract(model, named) for model in to_build)
    if to_build:
        configs = [(model.name, workspace / model.name, model.config()) for model in to_build]
    else:
        folder = Path(request.model)
        _refuse_a_name(request.model, folder)
        configs = [(str(request.model), folder, read_folder(folder))]
    contract = pick_contract(request.contract, configs[0][2])
    device = _device(request.kernel_set, contract)
    models = tuple(ModelFolder(name, path, check_shape_for(config, contract, device)) for name, path, config in configs)
    for model in models:
        for layout in layouts:
            check_layout(layout, model.shape, contract)
        if not to_build:
            check_weights(model.path, model.shape)
    vocab_size = min(model.shape.vocab_size for model in models)
    prompts = _prompts(request, None if to_build else models[0].path, vocab_size)
    check_lengths(prompts, request.max_new_tokens, min(model.shape.max_position_embeddings for model in models))
    check_environment(contract, device)
    check_installed(contract, device)
    check_device(device, max(max(layout.rollout.tp, layout.train.world_size) for layout in layouts))
    trains = [layout.train for layout in layouts]
    check(options, contract, [model.shape for model in models], trains, device, request.dtype)
    return LaunchPlan(
        contract=contract,
        kernel_set=request.kernel_set,
        device=device,
        dtype=request.dtype,
        models=models,
        to_build=to_build,
        layouts=layouts,
        prompts=prompts,
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=request.seed,
        report=request.json,
        options=options,
    )


def _refuse_a_name(given: str, folder: Path) -> None:
    """A published name is enough to plan a launch, but a run needs the weights."""
    name = None if is_folder(folder, "--model") else published_name(given)
    if name is not None:
        raise BadInput(
            f"--model {given}: is the name of a published model, and no folder here; a run needs its weights: "
            f"hf download {name} --local-dir DIR, then --model DIR"
        )


def _device(kernel_set: KernelSetName, contract: TrueOnPolicyContract) -> str:
    found = contract.kernel_policy.kernel_sets.get(kernel_set)
    if found is None:
        known = ", ".join(sorted(contract.kernel_policy.kernel_sets))
        raise BadInput(f"--kernel-set {kernel_set}: contract {contract.name} has {known}; use one of these")
    return found.device


def _check_numbers(request: VerifyRequest) -> None:
    check_temperature(request.temperature, "--temperature")
    if request.max_new_tokens < 1:
        raise BadInput(
            f"--max-new-tokens {request.max_new_tokens}: must be at least 1; an empty response proves nothing"
        )
    if request.num_prompts is not None and not 1 <= request.num_prompts <= MAX_PROMPTS:
        raise BadInput(f"--num-prompts {request.num_prompts}: must be 1 to {MAX_PROMPTS}")
    if request.prompt_tokens is not None:
        if request.prompts is not None:
            raise BadInput(f"--prompt-tokens {request.prompt_tokens}: the prompts of --prompts have their own lengths")
        if not 1 <= request.prompt_tokens <= MAX_PROMPT_TOKENS:
            raise BadInput(f"--prompt-tokens {request.prompt_tokens}: must be 1 to {MAX_PROMPT_TOKENS}")
    if not 0 <= request.seed <= MAX_SEED:
        raise BadInput(f"--seed {request.seed}: must be 0 to {MAX_SEED}")


def _layouts(request: VerifyRequest) -> tuple[Layout, ...]:
    sizes = {
        "--rollout-tp": request.rollout_tp,
        "--train-tp": request.train_tp,
        "--pp": request.pp,
        "--cp": request.cp,
        "--dp": request.dp,
    }
    given = [flag for flag, value in sizes.items() if value is not None]
    if request.matrix is not None:
        if given:
            raise BadInput(
                f"--matrix {request.matrix} names its own layouts; drop {', '.join(given)}, or drop --matrix"
            )
        return matrix_layouts(request.matrix, request.cp_layout)
    one = {flag: 1 if value is None else value for flag, value in sizes.items()}
    for flag, value in one.items():
        if abs(value) > MAX_RANKS:
            raise BadInput(f"{flag} {value}: more processes than the {MAX_RANKS} that one machine is asked for")
    train = TrainLayout(
        tp=one["--train-tp"], pp=one["--pp"], cp=one["--cp"], dp=one["--dp"], cp_layout=request.cp_layout
    )
    if max(train.world_size, one["--rollout-tp"]) > MAX_RANKS:
        raise BadInput(
            f"--rollout-tp {one['--rollout-tp']} and tp x pp x cp x dp = {train.world_size}: more processes than the "
            f"{MAX_RANKS} that one machine is asked for; use a smaller layout"
        )
    return (Layout(rollout=RolloutLayout(tp=one["--rollout-tp"]), train=train),)


def _random_models(request: VerifyRequest) -> tuple[RandomModel, ...]:
    if request.model in RANDOM_MODELS:
        return (RANDOM_MODELS[request.model],)
    if request.model != TINY:
        return ()
    return FULL_MODELS if request.matrix == "full" else SMALL_MODELS


def _prompts(request: VerifyRequest, model_dir: Path | None, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    if request.prompts is None:
        return draw_prompts(request.num_prompts or DEFAULT_PROMPTS, vocab_size, request.seed, request.prompt_tokens)
    prompts = read_prompts(request.prompts, model_dir, vocab_size)
    wanted = len(prompts) if request.num_prompts is None else request.num_prompts
    if wanted > len(prompts):
        raise BadInput(f"--num-prompts {wanted}: {request.prompts} holds {len(prompts)} prompts only")
    return prompts[:wanted]

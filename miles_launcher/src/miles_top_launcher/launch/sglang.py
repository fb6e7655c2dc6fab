"""SGLang's server arguments of a launch."""

from __future__ import annotations

from .._contract.schema.layout import Layout
from .._contract.schema.render import render_sglang
from ..profiles.recognise import KnownModel
from .arguments import Argument, ArgumentGroup, argument, from_settings
from .batch import Batch
from .request import LaunchRequest

#: Where the first engine of a machine listens; the next ones take the next ports.
FIRST_PORT = 30000

_WHY = {
    "attention_backend": "the contract's attention stands behind this name",
    "sampling_backend": "the contract's sampler stands behind this name",
    "sampling_defaults": "a generation_config.json would bring top-p and top-k in",
    "grammar_backend": "grammars mask logits",
    "enable_deterministic_inference": "without it SGLang ignores a request's seed",
    "disable_custom_all_reduce": "sums cross ranks in the contract's tree",
    "disable_prefill_cuda_graph": "prefill graphs pad tokens; decode runs from graphs",
    "page_size": "the size that the kernels were measured with",
    "dtype": "the contract's",
    "device": "where the kernel set runs",
    "disable_cuda_graph": "there are none on a CPU",
}


def contract_group(known: KnownModel, device: str) -> ArgumentGroup:
    """What the contract decides; left out, the plugin sets the same."""
    settings = render_sglang(known.contract, device)
    name = argument("--true-on-policy-contract", known.contract.name, why="turns the contract on; all else follows it")
    return ArgumentGroup(title="set by the contract", arguments=(name, *from_settings(settings, _WHY)))


def size_group(request: LaunchRequest, batch: Batch) -> ArgumentGroup:
    """Memory and batch limits: free choices, no number depends on them."""
    arguments: list[Argument] = [
        argument("--context-length", batch.max_context_len, why="no request is longer"),
        argument("--max-running-requests", request.sglang_max_running_requests),
    ]
    if request.kernel_set != "cpu":
        arguments += [
            argument("--mem-fraction-static", request.sglang_mem_fraction_static, why="weights and KV cache"),
            argument(
                "--cuda-graph-max-bs-decode",
                request.sglang_max_running_requests,
                why="every batch decodes from a graph",
            ),
        ]
    return ArgumentGroup(title="memory and batch limits", arguments=tuple(arguments))


def sglang_groups(
    request: LaunchRequest, known: KnownModel, layout: Layout, batch: Batch, model_dir: str, device: str
) -> tuple[ArgumentGroup, ...]:
    """All arguments of `python -m sglang.launch_server` but host, port and first GPU, which differ between engines."""
    model = ArgumentGroup(
        title="model and layout",
        arguments=(
            argument("--model-path", model_dir),
            argument("--tp-size", layout.rollout.tp, why="--rollout-num-gpus-per-engine"),
        ),
    )
    return (model, contract_group(known, device), size_group(request, batch))

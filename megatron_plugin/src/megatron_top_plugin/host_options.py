"""Options of Miles and slime under which the host's log-probs would not be the contract's."""

from __future__ import annotations

from typing import Any

from ._contract.schema.errors import OptionRefused

#: (argument, what it may be, why not otherwise). An argument that the host does not have is at its default.
HOST_OPTIONS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("train_backend", ("megatron",), "the contract's trainer is Megatron"),
    ("true_on_policy_mode", (False, None), "it rounds logits and rollout log-probs to bfloat16"),
    ("recompute_logprobs_via_prefill", (False, None), "it overwrites the sampled log-probs with others"),
    ("use_rollout_logprobs", (False, None), "the rollout would be compared with itself"),
    ("allgather_cp", (False, None), "sequences are cut in another way than the model's"),
    ("qkv_format", ("thd", None), "the model takes packed sequences"),
    ("sequence_parallel", (False, None), "it is not proven under the contract"),
    ("pause_generation_mode", ("abort", None), "requests would go on under other weights than they began with"),
    ("fp16", (False, None), "the contract's type is bfloat16"),
    ("use_critic", (False, None), "a critic's head is not the contract's"),
    ("keep_old_actor", (False, None), "another policy than the one that sampled would be scored"),
    ("partial_rollout", (False, None), "a response of two policies is no sample of either"),
    ("enable_mtp_training", (False, None), "the model has no such layers"),
    ("lora_rank", (0, None), "adapters are not proven under the contract"),
    ("loss_type", ("policy_loss", "sft_loss", None), "another loss need not use the contract's log-prob"),
    ("rollout_top_p", (1.0, None), "the sampled distribution is the whole one"),
    ("rollout_top_k", (-1, None), "the sampled distribution is the whole one"),
)


def check_host_options(args: Any) -> None:
    """Refuse a host's arguments under which the contract cannot hold.

    Raises:
        OptionRefused: naming the first such argument.
    """
    for name, allowed, why in HOST_OPTIONS:
        value = getattr(args, name, None)
        if value not in allowed and value is not None:
            choices = " or ".join(repr(choice) for choice in allowed if choice is not None)
            raise OptionRefused(f"host option {name}={value!r}: {why}; use {choices}")

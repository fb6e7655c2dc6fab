"""The `hopper` kernel set: exact on one kind of GPU (compute capability 9.0), for training.

The column-parallel product is DeepGEMM's and attention FlashAttention 3's, as sglang-kernel carries it; both are pinned
by version. All others are kernels of our own, the row-parallel product in CUDA and the rest in Triton. Nothing is tuned
at run time: blocks, warps and stages are constants, and every variant is compiled and hashed at start.
"""

from __future__ import annotations

from ..kernel_set import KernelSet


def kernels() -> KernelSet:
    """Assembles the set; the self-test compiles it, or loads it from the compilers' caches."""
    from ..bias import add_bias
    from ..tree import tree_sum
    from . import launch, self_test
    from .attention import attention
    from .linear import linear, linear_partial, linear_segmented
    from .logprob import log_softmax, logprob_combine, logprob_segments, logprob_token, scale_logits
    from .norm import add_rms_norm, rms_norm
    from .qk_norm_rope import qk_norm_rope
    from .rope import rope
    from .sample import sample
    from .swiglu import swiglu

    return KernelSet(
        name="hopper",
        linear=linear,
        linear_partial=linear_partial,
        linear_segmented=linear_segmented,
        add_bias=add_bias,
        tree_sum=tree_sum,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rope=rope,
        qk_norm_rope=qk_norm_rope,
        attention=attention,
        swiglu=swiglu,
        scale_logits=scale_logits,
        logprob_segments=logprob_segments,
        logprob_combine=logprob_combine,
        logprob_token=logprob_token,
        log_softmax=log_softmax,
        sample=sample,
        self_test=self_test.self_test,
        compiled_kernels=launch.compiled_kernels,
    )

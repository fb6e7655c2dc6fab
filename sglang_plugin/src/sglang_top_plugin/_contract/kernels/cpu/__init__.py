"""The `cpu` kernel set: exact by construction on any machine that numba compiles for; for trying, tests and CI.

Each kernel is a plain loop compiled by numba without fast-math. Nothing is tuned at run time, and one signature is
compiled of each, so both engines run the same machine code.
"""

from __future__ import annotations

from ..kernel_set import KernelSet


def kernels() -> KernelSet:
    """Assembles the set; importing the operations compiles them, or loads them from the cache."""
    from ..bias import add_bias
    from ..tree import tree_sum
    from . import compiled, self_test
    from .attention import attention
    from .linear import linear, linear_partial, linear_segmented
    from .logprob import log_softmax, logprob_combine, logprob_segments, logprob_token, scale_logits
    from .norm import add_rms_norm, rms_norm
    from .qk_norm_rope import qk_norm_rope
    from .rope import rope
    from .sample import sample
    from .swiglu import swiglu

    return KernelSet(
        name="cpu",
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
        compiled_kernels=compiled.compiled_kernels,
    )

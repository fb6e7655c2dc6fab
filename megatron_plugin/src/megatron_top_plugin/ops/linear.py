"""The two sharded products, and how their sums cross tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .._contract.kernels.kernel_set import KernelSet
from .._contract.kernels.rank_sum import sum_over_ranks
from .apply import apply


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _product(left: Tensor, right: Tensor) -> Tensor:
    """fp32 ``left [M, K] @ right [K, N]``: on a GPU from the operands as they are, no copy of either in fp32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _weight_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return _product(_rows(grad).t(), _rows(x)).to(weight.dtype)


class _ColumnLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kernels: KernelSet, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return kernels.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # Each rank saw only its output columns: the input's gradient is the fp32 sum over ranks, rounded once,
            # in the tree, so that it repeats bit by bit whatever road NCCL takes.
            wide = _product(_rows(grad), weight)
            summed = wide.to(x.dtype) if ctx.group is None else sum_over_ranks(wide, ctx.group, x.dtype)
            grad_x = summed.view_as(x)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_grad(grad, x, weight)
        return grad_x, grad_weight, None, None


class _RowLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, kernels: KernelSet, segments: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        if group is None:
            return kernels.linear_segmented(x, weight, segments)
        return sum_over_ranks(kernels.linear_partial(x, weight, segments), group, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # The output is replicated, and so is its gradient: each rank's input columns and weight need nothing from
        # others.
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(_rows(grad), weight).to(x.dtype).view_as(x)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_grad(grad, x, weight)
        return grad_x, grad_weight, None, None, None


class _AddBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, kernels: KernelSet) -> Tensor:
        return kernels.add_bias(x, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        return grad, _rows(grad).float().sum(0).to(grad.dtype), None


def _shared(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if group is not None and group.size() > 1 else None


def column_linear(x: Tensor, weight: Tensor, kernels: KernelSet, group: dist.ProcessGroup | None) -> Tensor:
    """``x [.., K]`` times ``weight [N_local, K]``: ``[.., N_local]`` in ``x.dtype``, fp32 accumulation, one rounding.

    ``group`` is the tensor-parallel group over which the gradient of a replicated ``x`` is summed (in fp32).
    """
    return apply(_ColumnLinear, x, weight, kernels, _shared(group))


def add_bias(x: Tensor, bias: Tensor, kernels: KernelSet) -> Tensor:
    """``x [.., N]``, a rounded product, plus ``bias [N]``, rounded again; the bias's gradient is summed in fp32."""
    return apply(_AddBias, x, bias, kernels)


def row_linear(
    x: Tensor, weight: Tensor, kernels: KernelSet, total_segments: int, group: dist.ProcessGroup | None
) -> Tensor:
    """``x [.., K_local]`` times ``weight [N, K_local]``, summed over ranks: ``[.., N]`` in ``x.dtype``.

    K is cut into ``total_segments`` segments over the whole group. A rank sums its own in fp32, the sums of all ranks
    meet in the contract's tree, and one rounding follows; so the result does not depend on the number of ranks.

    Raises:
        ValueError: when the group's size does not divide ``total_segments``.
    """
    shared = _shared(group)
    ranks = shared.size() if shared is not None else 1
    if total_segments % ranks:
        raise ValueError(f"{total_segments} row-parallel segments do not spread over {ranks} ranks")
    return apply(_RowLinear, x, weight, kernels, total_segments // ranks, shared)

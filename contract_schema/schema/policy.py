"""The typed kernel policy: one class an operator, one field a numeric decision.

A literal type is a decision with one proven value. Another value is another
contract, written with another version of this file.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

KernelSetName = Literal["cpu", "hopper"]
DTypeName = Literal["bfloat16", "float32"]


class Frozen(BaseModel):
    """Base of every object that crosses a boundary: immutable, no unknown field, no coercion."""

    # NaN and infinities are no JSON, so nothing that holds one could be digested or sent on
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _decoded_json(cls, data: Any) -> Any:
        """Take what `json.loads` gives: its lists are our tuples. Nothing else is converted."""
        return _tuples(data)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


class KernelSetPolicy(Frozen):
    """Where a kernel set runs and what it accepts."""

    device: Literal["cpu", "cuda"]
    dtypes: tuple[DTypeName, ...] = Field(min_length=1)
    k_step: int = Field(ge=1)
    """K elements that one step of the row-parallel kernel reads; divides every segment."""
    head_dims: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Elements of a head that its kernels are made for; any even number where it is None."""


class ColumnParallelPolicy(Frozen):
    """qkv, gate_up and lm_head: whole K in one order that depends on neither M nor N.

    A bias, where a family has one, is added in fp32 to the product as it was rounded, and the sum is rounded again:
    stock SGLang's deterministic mode adds it so, behind the product of DeepGEMM.
    """

    accumulate: Literal["float32"]
    order: Literal["whole_k_independent_of_m_and_n"]
    roundings: Literal[1]
    bias: Literal["float32_onto_rounded_product_rounded_again"] = "float32_onto_rounded_product_rounded_again"


class RowParallelPolicy(Frozen):
    """o and down: K in equal segments, fp32 sums, one balanced tree of adjacent pairs."""

    segments: int = Field(ge=1)
    accumulate: Literal["float32"]
    combine: Literal["adjacent_pair_tree_float32"]
    roundings: Literal[1]


class NormPolicy(Frozen):
    """RMSNorm with and without a residual, and the q/k norm."""

    statistics: Literal["float32"]
    residual_sum: Literal["float32_unrounded"]
    pipeline_dtype: Literal["float32"]
    qk_norm: Literal["rounded_before_rope"]
    order: Literal["fixed_block_over_row"]
    roundings: Literal[1]


class RopePolicy(Frozen):
    """Rotary embedding."""

    table: Literal["float32_computed_on_cpu"]
    scaling: Literal["float32_of_rounded_frequencies"] = "float32_of_rounded_frequencies"
    pairing: Literal["neox"]
    rotation: Literal["float32"]
    roundings: Literal[1]


class AttentionPolicy(Frozen):
    """Causal attention; a query row depends on its own keys only."""

    mask: Literal["causal"]
    scale: Literal["inverse_sqrt_head_dim"]
    num_splits: Literal[1]
    kv_head_replication: Literal[False]
    context_parallel: Literal["ulysses"]


class SwiGLUPolicy(Frozen):
    """`round(silu(fp32 gate) * fp32 up)`."""

    compute: Literal["float32"]
    roundings: Literal[1]


class VocabularyPolicy(Frozen):
    """How the vocabulary is padded and cut; the same at every tensor-parallel size."""

    pad_multiple: int = Field(ge=1)
    segments: int = Field(ge=1)


class LogprobPolicy(Frozen):
    """Log-probability of one token, in fp32."""

    dtype: Literal["float32"]
    rollout_source: Literal["decode"]
    temperature: Literal["ieee_division_skipped_at_one"]
    order: Literal["fixed_block_then_adjacent_pair_tree"]
    empty_segment: Literal["identity"]


class SamplingPolicy(Frozen):
    """A request's tokens depend on its own seed and positions only."""

    method: Literal["gumbel_of_seed_and_position"]
    seed: Literal["per_request"]
    missing_seed: Literal["from_request_id_and_sample_index"]
    greedy: Literal["temperature_zero_scored_at_one"]


class CompilePolicy(Frozen):
    """Compiled kernels are constants of the contract."""

    autotune: Literal[False]
    pointer_alignment_bytes: Literal[16]
    specialise_scalars: Literal[False]


class KernelPolicy(Frozen):
    """All numeric decisions of a contract."""

    kernel_sets: dict[KernelSetName, KernelSetPolicy] = Field(min_length=1)
    column_parallel: ColumnParallelPolicy
    row_parallel: RowParallelPolicy
    norm: NormPolicy
    rope: RopePolicy
    attention: AttentionPolicy
    swiglu: SwiGLUPolicy
    vocab: VocabularyPolicy
    logprob: LogprobPolicy
    sampling: SamplingPolicy
    compiled: CompilePolicy

    @model_validator(mode="after")
    def _edges_meet(self) -> Self:
        for name, count in (
            ("row_parallel.segments", self.row_parallel.segments),
            ("vocab.segments", self.vocab.segments),
        ):
            if count & (count - 1):
                raise ValueError(f"{name}={count} is no power of two: the tree needs one; use 8")
        if self.row_parallel.segments != self.vocab.segments:
            raise ValueError(
                f"row_parallel.segments={self.row_parallel.segments} and "
                f"vocab.segments={self.vocab.segments} differ: a rank owns both by one rule"
            )
        if self.vocab.pad_multiple % self.vocab.segments:
            raise ValueError(
                f"vocab.pad_multiple={self.vocab.pad_multiple} does not divide by "
                f"vocab.segments={self.vocab.segments}: shard edges would leave segment edges"
            )
        return self

"""Every refused field of Megatron's config is refused at every door, and what some of them would have changed.

Theorem: for each field that is classed refused, a value of its own type that is not its default is refused by the
trainer (`make_config`), by `model_provider` (`adopt_config`) and by `layer_spec` (`check_config`), before Megatron's
own checks, in one line that names field, value, reason and what is allowed. Where stock layers can run under such an
option on one CPU rank, their log-probs have other bits; where they can't or don't, the table says why. Neutral options
change no bit of a log-prob or a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from contract_schema.schema.option_tables import Surface, option_table
from contract_schema.schema.options import refused_fields
from miles_top_launcher.options import TAKEN
from miles_top_launcher.random_model import RandomModel
from tests.megatron.gradients import merged
from tests.megatron.rank_pool import RankPool
from tests.megatron.samples import FRESH, prompts

pytestmark = pytest.mark.distributed

SURFACE: Surface = "megatron.transformer_config"
VERSION = version("megatron-core")
TABLE = option_table(SURFACE, VERSION)
SAMPLES = prompts(1003, [(5, 9), (17, 30)])

#: Refused fields and fields set by the contract, each with options under which stock layers compute other bits.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "softmax_scale": {"softmax_scale": 0.5},
    "softmax_type": {"softmax_type": "off-by-one"},
    "window_size": {"window_size": (4, 0)},
    "no_rope_freq": {"no_rope_freq": 2},
    "activation_func_clamp_value": {"activation_func_clamp_value": 0.01},
    "glu_linear_offset": {"glu_linear_offset": 1.0},
    "use_mup": {"use_mup": True},
    "mup_base_hidden_size": {"use_mup": True, "mup_base_hidden_size": 64},
    "mup_embedding_mult": {"use_mup": True, "mup_embedding_mult": 2.0},
    "layernorm_epsilon": {"layernorm_epsilon": 1e-3},
    "rotary_interleaved": {"rotary_interleaved": True},
    "hidden_dropout": {"hidden_dropout": 0.1},
    "attention_dropout": {"attention_dropout": 0.1},
    "activation_func": {"activation_func": "gelu"},
    "bias_activation_fusion": {"bias_activation_fusion": True},
}
_ENGINE = "needs Transformer Engine or a GPU"
_ABSENT = "needs another kind of model than the contract's"
_RANKS = "needs more than one rank, where it changes an exchange or a cut and no number of one rank"
_GRADIENTS = "changes gradients alone"
#: Why a refused field shows no difference here, by the reason of its group; fields above are left out.
NOT_HERE: dict[str, str] = {
    "a fused kernel with roundings and orders of its own": _ENGINE,
    "attention of the contract is causal, unwindowed, unscaled beyond 1/sqrt(head_dim)": (
        "Transformer Engine's attention, another kind of model, or a branch that stock layers take in training on a GPU"
    ),
    "it changes the MLP or where a norm stands": _ABSENT,
    "context parallelism of the contract is Ulysses over whole groups": _RANKS,
    "uneven and virtual pipelines have not been proven": _RANKS,
    "overlapped or sharded tensor-parallel products have not been proven": _RANKS,
    "a gradient computed late or elsewhere has not been proven": _GRADIENTS,
    "autocast changes dtypes behind the contract": "autocast of the schedules is CUDA's",
    "low-precision products have other values than the rollout's": _ENGINE,
    "offloading and stashing of activations have not been proven": _ENGINE,
    "CUDA graphs of the trainer have not been proven": _ENGINE,
    "mixtures of experts are not in the contract": _ABSENT,
    "multi-token prediction is not in the contract": _ABSENT,
    "sparse, state-space and linear attention are not in the contract": _ABSENT,
    "scaled parametrisation multiplies embeddings and logits": "read beside use_mup alone",
    "it asks norms for a bias that RMSNorm has not": "Megatron stops with an error",
    "inference inside the trainer is not the rollout": "only inference with a KV cache reads it",
}

#: Neutral fields that a run may well set, together.
NEUTRAL: dict[str, Any] = {
    "deallocate_pipeline_outputs": True,
    "batch_p2p_comm": False,
    "attention_softmax_in_fp32": False,
    "deterministic_mode": True,
    "clone_scatter_output_in_embedding": False,
    "barrier_with_L1_time": False,
    "distribute_saved_activations": False,
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 1,
    "init_method_std": 0.5,
}


def test_every_refused_field_is_refused_at_every_door(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    (found,) = ranks.run("option_refusals", 1, model_folder(FRESH))
    assert tuple(found) == refused_fields(SURFACE, VERSION)
    assert len(found) == 217
    for field, doors in found.items():
        classed = TABLE.class_of(field)
        assert classed is not None
        assert set(doors) == {"make_config", "model_provider", "layer_spec"}
        for door, line in doors.items():
            assert line.startswith(f"OptionRefused: {SURFACE} {field}="), (door, line)
            assert f": refused, because {classed[1].reason}; allowed: " in line, (door, line)
            assert "\n" not in line


def test_a_field_of_tomorrow_is_refused_and_its_default_is_not(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    (found,) = ranks.run("option_of_tomorrow", 1, model_folder(FRESH))
    refusal = f"OptionRefused: {SURFACE} a_field_of_tomorrow=4: not classed for version {VERSION}; allowed"
    for default, other in (found[:2], found[2:]):
        assert default == "not refused"
        assert other.startswith(refusal)


def test_what_the_trainer_sets_is_refused_at_another_value_and_the_launcher_knows_it(
    ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    (found,) = ranks.run("set_by_the_trainer", 1, model_folder(FRESH))
    assert set(found) <= set(TAKEN["--megatron"])
    for field, line in found.items():
        assert f"megatron option {field}=" in line
        assert "the trainer sets it to" in line


def test_options_that_would_have_changed_the_bits(ranks: RankPool, model_folder: Callable[[RandomModel], str]) -> None:
    (found,) = ranks.run("stock_differences", 1, model_folder(FRESH), SAMPLES, DIFFERENCES)
    assert found == dict.fromkeys(DIFFERENCES, "differs")


def test_every_refused_field_is_shown_to_differ_or_said_why_not() -> None:
    """A group that is classed later stands in neither table, and fails here."""
    left = {group.reason for group in TABLE.refused if set(group.fields) - DIFFERENCES.keys()}
    assert left == set(NOT_HERE)
    kinds = {classed[0] for field in DIFFERENCES if (classed := TABLE.class_of(field)) is not None}
    assert kinds == {"refused", "set_by_contract"}
    assert all(TABLE.class_of(field) is not None for field in DIFFERENCES)


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"tp": 2}], ids=str)
def test_neutral_options_change_no_bit(
    layout: dict[str, int], ranks: RankPool, model_folder: Callable[[RandomModel], str]
) -> None:
    assert {classed[0] for field in NEUTRAL if (classed := TABLE.class_of(field)) is not None} == {"neutral"}
    model, world = model_folder(RandomModel(tied=False)), max([1, *layout.values()])
    runs = [
        ranks.run("gradients", world, model, layout, SAMPLES, "bfloat16", options=options) for options in ({}, NEUTRAL)
    ]
    assert runs[0][0][0] == runs[1][0][0]
    kept, again = (merged([part[1] for part in parts]) for parts in runs)
    assert [name for name in kept if not np.array_equal(kept[name], again[name])] == []
    scores = [
        ranks.run("score", world, model, layout, SAMPLES, [(1.0, None)], options=options)[0]
        for options in ({}, NEUTRAL)
    ]
    assert scores[0] == scores[1]

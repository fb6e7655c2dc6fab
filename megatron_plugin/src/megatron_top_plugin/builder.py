"""The door of ``megatron.training`` that builds the whole model: a model config with a builder of its own.

A training script adds the contract's arguments to Megatron's parser and hands the config over::

    args = parse_and_validate_args(extra_args_provider=add_arguments)
    config = model_config_from_args(args)
    config.pre_wrap_hooks.append(load_hf_checkpoint)  # to go on from the folder's weights
    pretrain(pretrain_cfg_container_from_args(args, config), datasets, ModelType.encoder_or_decoder, forward_step)

Its forward step passes ``labels`` to the model as it does with a stock one, and gets minus the contract's log-probs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.training import get_args as parsed_args
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

from ._contract.schema.layout import CpLayout
from .hosts import build_from_args
from .model import SGLangGPTModel
from .numerics import numerics_of
from .weights.load import load_hf_weights


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds what a contract needs to know and Megatron's own parser does not ask for."""
    group = parser.add_argument_group("true on-policy")
    group.add_argument(
        "--hf-checkpoint", metavar="DIR", help="Hugging Face folder that the model's sizes and constants come from."
    )
    group.add_argument(
        "--true-on-policy-contract", metavar="NAME", help="Contract; the model's own when not given.", default=None
    )
    group.add_argument(
        "--cp-layout",
        choices=get_args(CpLayout),
        default="zigzag",
        help="How sequences are cut over context-parallel ranks.",
    )
    return parser


@dataclass(kw_only=True)
class SGLangGPTModelConfig(GPTModelConfig):
    """Megatron's model config, built by :class:`SGLangGPTModelBuilder`."""

    builder: ClassVar[str] = f"{__name__}.SGLangGPTModelBuilder"


def model_config_from_args(args: argparse.Namespace) -> SGLangGPTModelConfig:
    """The model config of parsed arguments, ready for Megatron's ``pretrain``."""
    config: SGLangGPTModelConfig = gpt_config_from_args(args, model_config_cls=SGLangGPTModelConfig)
    return config


def load_hf_checkpoint(models: list[Any]) -> list[Any]:
    """Fills the stages of this rank, not yet wrapped, from the folder that ``--hf-checkpoint`` names.

    Raises:
        UnsupportedModel: when the folder does not hold this model.
    """
    for model in models:
        shape, tp_group = numerics_of(model.config).shape, model.pg_collection.tp
        load_hf_weights(model, parsed_args().hf_checkpoint, shape, tp_group.rank(), tp_group.size())
    return models


class SGLangGPTModelBuilder(GPTModelBuilder):
    """Builds the contract's model where the stock builder would build Megatron's.

    The layers, the embedding, the head and the padded vocabulary are the contract's; of the model config only the
    transformer config is read, what the contract sets replaced and the rest kept.
    """

    def build_model(
        self,
        pg_collection: Any,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> SGLangGPTModel:
        """One pipeline stage, its parameters not yet filled.

        Raises:
            Refusal: for a model, layout or option that the contract does not cover.
        """
        return build_from_args(
            parsed_args(),
            self._model_config.transformer,
            pre_process=is_pp_first_stage(pg_collection.pp) if pre_process is None else pre_process,
            post_process=is_pp_last_stage(pg_collection.pp) if post_process is None else post_process,
            vp_stage=vp_stage,
        )

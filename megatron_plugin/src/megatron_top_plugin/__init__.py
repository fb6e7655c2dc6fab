"""Stock megatron-core under a true-on-policy contract: the rollout engine's numerics in a differentiable forward.

Where things are: ``spec.SGLangSpecProvider`` and ``spec.get_block_spec`` (layers), ``model.build_model``,
``weights.load`` and ``weights.save`` (Hugging Face folders), ``logprobs.packed_logprobs``, ``trainer.Trainer``,
``hosts`` (entry points of training frameworks). Importing this package imports neither torch nor megatron.
"""

from . import unloadable

unloadable.hide()

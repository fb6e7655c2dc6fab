"""Steps of Miles itself on stock engines: its Ray actors, its rollout, its loss, its optimiser, its weight updates.

``python -m tests.hosts.miles_step HF_FOLDER CHECKPOINT [OPTIONS]`` on two GPUs, one for each side, in an environment as
`requirements/miles.sh` makes it. HF_FOLDER holds the model and a tokenizer of words ``w0``, ``w1``, ..; CHECKPOINT the
same weights as ``megatron.training`` saves them. OPTIONS, a JSON object, are further arguments of Miles by name; with
``{"debug_rollout_only": true, "sglang_device": "cpu"}`` only the rollout runs, and needs no GPU.

Miles prints ``train_rollout_logprob_abs_diff`` and how many tokens were compared; a token that differs ends the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.hosts.miles_arguments import parse, rendered
from tests.hosts.stand_ins import setup

CONTRACT = "qwen3_dense_true_on_policy_v1"
PROMPTS = 8


async def reward(args: Any, sample: Any, **_: Any) -> float:
    """Miles' ``--custom-rm-path``: a number that differs between samples."""
    return float(len(set(sample.tokens)) % 5)


def _arguments(model: str, checkpoint: str, folder: Path, more: dict[str, Any]) -> Any:
    data = folder / "prompts.jsonl"
    texts = (" ".join(f"w{(7 * index + place) % 1000 + 3}" for place in range(5 + index)) for index in range(PROMPTS))
    data.write_text("".join(json.dumps({"text": text, "label": "w1"}) + "\n" for text in texts))
    options = {
        "ref_load": checkpoint,
        "prompt_data": str(data),
        "input_key": "text",
        "label_key": "label",
        "custom_rm_path": "tests.hosts.miles_step.reward",
        "rollout_max_response_len": 32,
        "rollout_max_context_len": 512,
        "seq_length": 512,
        "num_rollout": 2,
        "rollout_num_gpus": 1,
        "num_gpus_per_node": 2,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 2048,
        "micro_batch_size": None,
        "finetune": True,
        "no_load_optim": True,
        "no_load_rng": True,
        "use_cpu_initialization": False,
        "sglang_mem_fraction_static": 0.3,
        "sglang_cuda_graph_max_bs": 8,
    }
    words = rendered(model, {}, **(options | more))
    print(" ".join(words), flush=True)
    args = parse(words)
    # The parser of megatron-core 0.19.2 calls it use_gloo_process_groups.
    args.enable_gloo_process_groups = True
    return args


async def _train(args: Any) -> None:
    """The order of Miles' own driver, which is in its repository and not in the wheel."""
    from miles.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models

    groups = create_placement_groups(args)
    manager, _ = create_rollout_manager(args, groups["rollout"])
    if args.debug_rollout_only:
        await manager.set_train_parallel_config.remote({"dp_size": 1})
        await manager.generate.remote(0)
        print("generated 0", flush=True)
        return
    actor, _ = await create_training_models(args, groups, manager)
    await actor.update_weights()
    for index in range(args.start_rollout_id, args.num_rollout):
        data = await manager.generate.remote(index)
        print(f"generated {index}", flush=True)
        await actor.train(index, data)
        print(f"trained {index}", flush=True)
        await actor.update_weights()
        print(f"weights updated {index}", flush=True)


def main(model: str, checkpoint: str, more: str = "{}") -> None:
    folder = Path(os.environ.setdefault("TRUE_ON_POLICY_RECEIPTS", "build/miles-step")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "TRUE_ON_POLICY_CONTRACT": CONTRACT,
        "TRUE_ON_POLICY_RECEIPTS": str(folder),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    setup()
    import ray

    args = _arguments(model, checkpoint, folder, json.loads(more))
    names = ("TRUE_ON_POLICY", "SGLANG", "NCCL", "CUBLAS", "NVTE", "CUDA_DEVICE", "TRITON", "OMP", "HF_")
    env = {name: value for name, value in os.environ.items() if name.startswith(names)}
    env["PYTHONPATH"] = os.pathsep.join(path for path in [str(Path.cwd()), *sys.path] if path)
    ray.init(
        num_gpus=2,
        num_cpus=8,
        include_dashboard=False,
        runtime_env={"env_vars": env, "worker_process_setup_hook": "tests.hosts.stand_ins.setup"},
    )
    asyncio.run(_train(args))


if __name__ == "__main__":
    main(*sys.argv[1:])

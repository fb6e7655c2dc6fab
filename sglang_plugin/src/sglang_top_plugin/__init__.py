"""True on-policy rollouts on a stock SGLang, as a plugin.

Install the distribution ``sglang-top-plugin`` beside ``sglang`` and name a contract:

    python -m sglang.launch_server --true-on-policy-contract qwen3_dense_true_on_policy_v1 --model-path DIR --device cpu

    if __name__ == "__main__":  # SGLang spawns its schedulers
        engine = sglang.Engine(
            model_path=DIR, device="cpu", tp_size=2, skip_tokenizer_init=True, max_total_tokens=8192,
            true_on_policy_contract="qwen3_dense_true_on_policy_v1",
        )
        outputs = engine.generate(
            input_ids=[[1, 2, 3]],
            sampling_params=[{"temperature": 1.0, "max_new_tokens": 8, "sampling_seed": 7}],
            return_logprob=True,
        )
        receipts = engine.get_server_info()["true_on_policy"]["receipts"]

``meta_info["output_token_logprobs"]`` then holds the exact fp32 log-prob of each token as it was sampled, and
``meta_info["sampling_seed"]`` the seed that drew it. The contract sets the server arguments that it needs; one that
contradicts it is refused with one line and exit code 2. The dtype is bfloat16 unless ``dtype="float32"`` is given.

With no contract named, the hooks of :func:`register` pass every call on untouched.
"""

import os


def register() -> None:
    """The entry point of ``sglang.srt.plugins``: hooks the flag in, and nothing else. Called once in every process.

    SGLang logs what is raised here and goes on; in a job under a contract the process ends instead.
    """
    try:
        from . import flag
    except Exception as error:
        if os.environ.get("TRUE_ON_POLICY_CONTRACT"):
            from .stopping import stop

            stop(f"the plugin can't be loaded: {type(error).__name__}: {error}")
        raise

    flag.register()

#!/usr/bin/env bash
# Qwen3-8B-Base under qwen3_dense_true_on_policy_v1: trainer tp=2 pp=1 cp=1 dp=2, 2 engines of tp=2. Written by miles-top plan.
# not run: this model in this layout is planned, not run
# note: Miles needs the stand-ins of docs/hosts.md on stock engines, and at --ref-load a torch_dist checkpoint that megatron.training or Miles' own converter has made
# Usage: SCRIPT prepare|miles|sglang|megatron [arguments of the program]
set -euo pipefail

DEFAULT_MODEL_DIR=/models/Qwen3-8B-Base
MODEL_DIR="${MODEL_DIR:-$DEFAULT_MODEL_DIR}"

# rollout: returned log-probs are those of the tempered distribution that was sampled
export SGLANG_RETURN_ORIGINAL_LOGPROB=0
# rollout: it imports a kernel package that is not published, before any plugin loads
export SGLANG_USE_CPU_ENGINE=0
# rollout: its front neither checks requests nor gives them seeds
export SGLANG_RUST_SERVER=0
# rollout: another plugin could change the engine's numbers unseen
export SGLANG_PLUGINS=true_on_policy
# both: ring order follows the message size
export NCCL_ALGO=allreduce:tree
# both: NVLS sums in an order that differs between calls
export NCCL_NVLS_ENABLE=0
# both: backward products repeat bit by bit
export CUBLAS_WORKSPACE_CONFIG=:4096:8
# both: a host's own layers stay deterministic
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
# trainer: Megatron refuses tensor and context parallelism without it on GPUs before Blackwell
export CUDA_DEVICE_MAX_CONNECTIONS=1
# miles: Miles hands SGLang no argument that stock SGLang lacks, so that its processes read this
export TRUE_ON_POLICY_CONTRACT=qwen3_dense_true_on_policy_v1
# miles: the folder that each side's receipts are written to
export TRUE_ON_POLICY_RECEIPTS=/tmp/true-on-policy-receipts
# both: tokenizers warn in forked processes, and SGLang forks
export TOKENIZERS_PARALLELISM=false

# arguments of python -m sglang.launch_server
SGLANG_ARGS=(
  # model and layout
  --model-path "$MODEL_DIR"
  --tp-size 2  # --rollout-num-gpus-per-engine
  # set by the contract
  --true-on-policy-contract qwen3_dense_true_on_policy_v1  # turns the contract on; all else follows it
  --device cuda  # where the kernel set runs
  --dtype bfloat16  # the contract's
  --attention-backend fa3  # the contract's attention stands behind this name
  --sampling-backend pytorch  # the contract's sampler stands behind this name
  --sampling-defaults openai  # a generation_config.json would bring top-p and top-k in
  --grammar-backend none  # grammars mask logits
  --enable-deterministic-inference  # without it SGLang ignores a request's seed
  --disable-custom-all-reduce  # sums cross ranks in the contract's tree
  --disable-prefill-cuda-graph  # prefill graphs pad tokens; decode runs from graphs
  --page-size 1  # the size that the kernels were measured with
  # memory and batch limits
  --context-length 16384  # no request is longer
  --max-running-requests 256
  --mem-fraction-static 0.6  # weights and KV cache
  --cuda-graph-max-bs-decode 256  # every batch decodes from a graph
)

# arguments of a megatron.training script
MEGATRON_ARGS=(
  # model
  --num-layers 36
  --hidden-size 4096
  --ffn-hidden-size 12288
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --qk-layernorm
  --normalization RMSNorm
  --norm-epsilon 1e-06
  --disable-bias-linear
  --swiglu
  --position-embedding-type rope
  --rotary-base 1000000
  --untie-embeddings-and-output-weights
  --vocab-size 151936
  --make-vocab-size-divisible-by 32  # Megatron multiplies it by TP: the vocabulary is padded to 151936 at every TP
  # layout
  --tensor-model-parallel-size 2
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  # set by the contract
  --bf16  # weights and activations; sums are fp32 inside the contract's layers
  --transformer-impl local  # the contract brings its own layers; no TransformerEngine
  --hidden-dropout 0  # the rollout drops nothing
  --attention-dropout 0  # the rollout drops nothing
  --no-persist-layer-norm  # fused kernels round and sum in an order of their own
  --no-masked-softmax-fusion
  --no-bias-dropout-fusion
  --no-bias-swiglu-fusion
  --no-rope-fusion
  --no-gradient-accumulation-fusion
  # optimiser and memory
  --optimizer adam
  --lr 1e-06
  --lr-decay-style constant
  --accumulate-allreduce-grads-in-fp32
  --use-distributed-optimizer
  --recompute-granularity selective  # the same forward again: changes no bit
  --recompute-modules core_attn
  # run
  --spec megatron_top_plugin.hosts layer_spec  # the contract's layers
  --seq-length 16384
  --max-position-embeddings 32768
  --micro-batch-size 1
  --global-batch-size 256
)

# arguments of Miles' train.py
MILES_ARGS=(
  # cluster
  --actor-num-nodes 1
  --actor-num-gpus-per-node 4
  --num-gpus-per-node 8
  --rollout-num-gpus 4
  --rollout-num-gpus-per-engine 2
  # model and contract
  --hf-checkpoint "$MODEL_DIR"  # sizes, tokenizer and the rollout's first weights
  --ref-load "${MODEL_DIR}_torch_dist"  # the Megatron checkpoint that training starts from
  --custom-model-provider-path megatron_top_plugin.hosts.model_provider  # the whole model under the contract
  --custom-megatron-init-path megatron_top_plugin.hosts.init  # the host's log-prob becomes the contract's
  --custom-megatron-before-log-prob-hook-path megatron_top_plugin.hosts.show_receipts  # each rank shows its receipt
  # model
  --num-layers 36
  --hidden-size 4096
  --ffn-hidden-size 12288
  --num-attention-heads 32
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --qk-layernorm
  --normalization RMSNorm
  --norm-epsilon 1e-06
  --disable-bias-linear
  --swiglu
  --position-embedding-type rope
  --rotary-base 1000000
  --untie-embeddings-and-output-weights
  --vocab-size 151936
  --make-vocab-size-divisible-by 32  # Megatron multiplies it by TP: the vocabulary is padded to 151936 at every TP
  # layout
  --tensor-model-parallel-size 2
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  # set by the contract
  --bf16  # weights and activations; sums are fp32 inside the contract's layers
  --transformer-impl local  # the contract brings its own layers; no TransformerEngine
  --hidden-dropout 0  # the rollout drops nothing
  --attention-dropout 0  # the rollout drops nothing
  --no-persist-layer-norm  # fused kernels round and sum in an order of their own
  --no-masked-softmax-fusion
  --no-bias-dropout-fusion
  --no-bias-swiglu-fusion
  --no-rope-fusion
  --no-gradient-accumulation-fusion
  # optimiser and memory
  --optimizer adam
  --lr 1e-06
  --lr-decay-style constant
  --accumulate-allreduce-grads-in-fp32
  --use-distributed-optimizer
  --recompute-granularity selective  # the same forward again: changes no bit
  --recompute-modules core_attn
  # rollout
  --num-rollout 100
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --rollout-max-context-len 16384
  --rollout-max-response-len 8192
  --rollout-temperature 1  # the trainer divides logits by the same
  --rollout-seed 42
  --pause-generation-mode abort  # no request lives over a weight update
  --prompt-data '/data/prompts with spaces.jsonl'
  # training
  --global-batch-size 256
  --seq-length 16384
  --use-dynamic-batch-size  # micro-batches by tokens; packing changes no bit
  --max-tokens-per-gpu 8192
  --advantage-estimator grpo
  --eps-clip 0.2
  --mtp-loss-scaling-factor 0.1  # Megatron's default; Miles' own is refused as unproven
  # SGLang
  --sglang-device cuda  # where the kernel set runs
  --sglang-dtype bfloat16  # the contract's
  --sglang-attention-backend fa3  # the contract's attention stands behind this name
  --sglang-sampling-backend pytorch  # the contract's sampler stands behind this name
  --sglang-sampling-defaults openai  # a generation_config.json would bring top-p and top-k in
  --sglang-grammar-backend none  # grammars mask logits
  --sglang-enable-deterministic-inference  # without it SGLang ignores a request's seed
  --sglang-disable-custom-all-reduce  # sums cross ranks in the contract's tree
  --sglang-page-size 1  # the size that the kernels were measured with
  --sglang-context-length 16384  # no request is longer
  --sglang-max-running-requests 256
  --sglang-mem-fraction-static 0.6  # weights and KV cache
  --sglang-cuda-graph-max-bs 256  # every batch decodes from a graph
)

section="${1:-}"
[ "$#" -gt 0 ] && shift
case "$section" in
prepare)
  # on every machine, or on a disk that all of them share
  hf download Qwen/Qwen3-8B-Base --local-dir "$MODEL_DIR"
  ;;
miles)
  # once, where Ray's dashboard is reached, from a checkout of Miles; data, reward and logging are yours:
  # SCRIPT miles --prompt-data FILE --input-key KEY --label-key KEY --rm-type TYPE
  exec ray job submit --address http://127.0.0.1:8265 \
    --runtime-env-json '{"env_vars": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "allreduce:tree", "NCCL_NVLS_ENABLE": "0", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "SGLANG_PLUGINS": "true_on_policy", "SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "SGLANG_RUST_SERVER": "0", "SGLANG_USE_CPU_ENGINE": "0", "TOKENIZERS_PARALLELISM": "false", "TRUE_ON_POLICY_CONTRACT": "qwen3_dense_true_on_policy_v1", "TRUE_ON_POLICY_RECEIPTS": "/tmp/true-on-policy-receipts"}, "worker_process_setup_hook": "sglang_top_plugin.hosts.load"}' \
    -- python3 train.py "${MILES_ARGS[@]}" "$@"
  ;;
sglang)
  # on each machine of the rollout, without a trainer on its GPUs: all its engines, a port each
  # and where one ends, all end
  trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
  for engine in $(seq 0 1); do
    python -m sglang.launch_server "${SGLANG_ARGS[@]}" --host 0.0.0.0 --port "$((30000 + engine))" --base-gpu-id "$((4 + engine * 2))" "$@" &
  done
  wait -n
  ;;
megatron)
  # on each machine of the trainer; TRAIN_SCRIPT calls megatron.training.pretrain and knows --hf-checkpoint
  exec torchrun --nnodes 1 --nproc-per-node 4 \
    "${TRAIN_SCRIPT:?}" "${MEGATRON_ARGS[@]}" --hf-checkpoint "$MODEL_DIR" "$@"
  ;;
*)
  echo "name a section: prepare, miles, sglang or megatron" >&2
  exit 2
  ;;
esac

#!/usr/bin/env bash
# Qwen3-0.6B under qwen3_dense_true_on_policy_v1: trainer tp=1 pp=1 cp=2 dp=1, 2 engines of tp=1. Written by miles-top plan.
# not run: this model in this layout is planned, not run
# Usage: SCRIPT prepare|miles|sglang|megatron [arguments of the program]
set -euo pipefail

DEFAULT_MODEL_DIR=/models/Qwen3-0.6B
MODEL_DIR="${MODEL_DIR:-$DEFAULT_MODEL_DIR}"

# rollout: returned log-probs are those of the tempered distribution that was sampled
export SGLANG_RETURN_ORIGINAL_LOGPROB=0
# rollout: it imports a kernel package that is not published, before any plugin loads
export SGLANG_USE_CPU_ENGINE=0
# rollout: its front neither checks requests nor gives them seeds
export SGLANG_RUST_SERVER=0
# rollout: another plugin could change the engine's numbers unseen
export SGLANG_PLUGINS=true_on_policy
# both: tokenizers warn in forked processes, and SGLang forks
export TOKENIZERS_PARALLELISM=false

# arguments of python -m sglang.launch_server
SGLANG_ARGS=(
  # model and layout
  --model-path "$MODEL_DIR"
  --tp-size 1  # --rollout-num-gpus-per-engine
  # set by the contract
  --true-on-policy-contract qwen3_dense_true_on_policy_v1  # turns the contract on; all else follows it
  --device cpu  # where the kernel set runs
  --dtype bfloat16  # the contract's
  --attention-backend torch_native  # the contract's attention stands behind this name
  --sampling-backend pytorch  # the contract's sampler stands behind this name
  --sampling-defaults openai  # a generation_config.json would bring top-p and top-k in
  --grammar-backend none  # grammars mask logits
  --enable-deterministic-inference  # without it SGLang ignores a request's seed
  --disable-cuda-graph  # there are none on a CPU
  # memory and batch limits
  --context-length 16384  # no request is longer
  --max-running-requests 256
)

# arguments of a megatron.training script
MEGATRON_ARGS=(
  # model
  --num-layers 28
  --hidden-size 1024
  --ffn-hidden-size 3072
  --num-attention-heads 16
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
  --vocab-size 151936
  --make-vocab-size-divisible-by 64  # Megatron multiplies it by TP: the vocabulary is padded to 151936 at every TP
  # layout
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 2
  --cp-comm-type a2a  # Ulysses: whole heads change places
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
  --use-cpu-initialization
  # optimiser and memory
  --optimizer adam
  --lr 1e-06
  --lr-decay-style constant
  --accumulate-allreduce-grads-in-fp32
  --use-distributed-optimizer
  --recompute-granularity full  # the same forward again: changes no bit
  --recompute-method uniform
  --recompute-num-layers 1
  # run
  --spec megatron_top_plugin.hosts layer_spec  # the contract's layers
  --seq-length 16384
  --max-position-embeddings 40960
  --micro-batch-size 1
  --global-batch-size 256
  --distributed-backend gloo
)

section="${1:-}"
[ "$#" -gt 0 ] && shift
case "$section" in
prepare)
  # on every machine, or on a disk that all of them share
  hf download Qwen/Qwen3-0.6B --local-dir "$MODEL_DIR"
  ;;
sglang)
  # on each machine of the rollout, without a trainer on its GPUs: all its engines, a port each
  # and where one ends, all end
  trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
  for engine in $(seq 0 1); do
    python -m sglang.launch_server "${SGLANG_ARGS[@]}" --host 0.0.0.0 --port "$((30000 + engine))" "$@" &
  done
  wait -n
  ;;
megatron)
  # on each machine of the trainer; TRAIN_SCRIPT calls megatron.training.pretrain and knows --hf-checkpoint
  exec torchrun --nnodes 1 --nproc-per-node 2 \
    "${TRAIN_SCRIPT:?}" "${MEGATRON_ARGS[@]}" --hf-checkpoint "$MODEL_DIR" "$@"
  ;;
*)
  echo "name a section: prepare, sglang or megatron" >&2
  exit 2
  ;;
esac

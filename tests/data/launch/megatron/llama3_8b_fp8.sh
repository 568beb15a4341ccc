#!/bin/bash
# Written for the tests after the flags of NVIDIA/Megatron-LM@157006d6 examples/llama/train_llama3_8b_h100_fp8.sh

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

OUTPUT=${1:-"checkpoints/llama3_8b_fp8"}
BOARD=${2:-"board/llama3_8b_fp8"}
TOKENIZER=${3:-"MOCK"}   # a path, or MOCK
CORPUS=${4:-"MOCK"}
mkdir -p "$(dirname "$OUTPUT")" "$(dirname "$BOARD")"

GPUS_PER_NODE=8
NUM_NODES=1
PROGRAM="examples/classes/pretrain_gpt.py"
TP=1
CP=1
MICRO=1
GLOBAL=128
DTYPE="fp8"
SEQ=8192
CACHE="${PWD}/cache"

LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank ${NODE_RANK:-0}
    --master_addr ${MASTER_ADDR:-localhost}
    --master_port ${MASTER_PORT:-6000}
)
MODEL=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length $SEQ
    --max-position-embeddings $SEQ
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --init-method-std 0.0134
    --attention-backend fused
    --apply-layernorm-1p
    --untie-embeddings-and-output-weights
    --disable-bias-linear
)
TRAINING=(
    --micro-batch-size $MICRO
    --global-batch-size $GLOBAL
    --train-samples 1953125000
    --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252
    --lr 0.00015
    --min-lr 0.00001
    --decoupled-lr 5.0e-4
    --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine
    --clip-grad 1.0
    --weight-decay 0.1
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --manual-gc
    --empty-unused-memory-level 1
    --exit-duration-in-mins 235
)
PRECISION=()
if [[ "$DTYPE" == "fp8" ]]; then
    PRECISION+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
fi
LAYOUT=(
    --tensor-model-parallel-size $TP
    --context-parallel-size $CP
    # --pipeline-model-parallel-size 1
    --sequence-parallel  # no effect with one rank
)
OVERLAP=(
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
TRAINING+=("${OVERLAP[@]}")

DATA=()
if [[ "$TOKENIZER" == "MOCK" ]] || [[ "$CORPUS" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
    DATA+=(
        "--mock-data"
        "--tokenizer-type NullTokenizer"
        "--vocab-size 128256"
        "--data-cache-path ${CACHE}"
        "--tiktoken-pattern v2"
        "--split '99,1,0'"
        "--no-create-attention-mask-in-dataloader"
        "--no-mmap-bin-files"
        "--num-workers 1"
    )
else
    DATA+=(
        "--data-path $CORPUS"
        "--tokenizer-type HuggingFaceTokenizer"
        "--tokenizer-model $TOKENIZER"
        "--vocab-size 128256"
    )
fi
REPORT=(
    --log-interval 1
    --eval-iters 32
    --log-throughput
    --profile
    --profile-step-start 4
    --profile-step-end 6
    --ckpt-format torch_dist
    --distributed-timeout-minutes 60
    --save "$OUTPUT"
    --load "$OUTPUT"
    --tensorboard-dir "$BOARD"
)

if [ ! -f "$PROGRAM" ]; then
    echo "no $PROGRAM here"
    exit 1
fi

torchrun ${LAUNCH[@]} \
    "$PROGRAM" \
    ${MODEL[@]} \
    ${TRAINING[@]} \
    ${PRECISION[@]} \
    ${LAYOUT[@]} \
    ${DATA[@]} \
    ${REPORT[@]}

set +x

#!/bin/bash
# Written for the tests after the flags of NVIDIA/Megatron-LM@0a40979e examples/mixtral/train_mixtral_8x7b_distributed.sh

NNODES=${SLURM_NNODES:-"1"}
LAUNCH=(
    --nproc_per_node 8
    --nnodes $NNODES
)
MODEL=(
    --use-mcore-models
    --disable-bias-linear
    --seq-length 4096
    --max-position-embeddings 32768
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 8
    --no-masked-softmax-fusion
    --no-position-embedding
    --rotary-base 1000000
)
EXPERTS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
#    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --overlap-param-gather
    --overlap-grad-reduce
)
TRAINING=(
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model /data/tokenizer.model
    --mock-data
    --micro-batch-size 1
    --global-batch-size 256
    --lr 1e-4
    --train-iters 500000
    --clip-grad 1.0
    --bf16
)
LAYOUT=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --sequence-parallel
)
REPORT=(
    --log-interval 1 \
    --eval-iters 10 \
    #--save $OUTPUT \
    --no-load-optim \
    --no-load-rng
)
if [ -n "${WANDB_API_KEY}" ]; then
    REPORT+=(
        --wandb-project ${WANDB_PROJECT:-"Mixtral"}
    )
fi

torchrun ${LAUNCH[@]} pretrain_gpt.py ${MODEL[@]} ${EXPERTS[@]} ${TRAINING[@]} ${LAYOUT[@]} ${REPORT[@]}

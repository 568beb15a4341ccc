#!/bin/bash
# Written for the tests after the flags of NVIDIA/Megatron-LM@157006d6 examples/gpt3/train_gpt3_175b_distributed.sh

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-128}   # a multiple of 16
MAIN_HOST=${MAIN_HOST:-node0}
ALL_GPUS=$(($GPUS_PER_NODE*$NUM_NODES))

OUTPUT=$1    # checkpoints
BOARD=$2
VOCAB=$3
MERGES=$4
CORPUS=$5

LAUNCH=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MAIN_HOST
    --master_port 6000
)
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # flash, fused, unfused or local
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
LAYOUT=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)
DATA=(
    --data-path $CORPUS
    --vocab-file $VOCAB
    --merge-file $MERGES
    --split 949,50,1
)
REPORT=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --save $OUTPUT
    --load $OUTPUT
    --eval-iters 10
    --tensorboard-dir $BOARD
)

echo "$ALL_GPUS devices"
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL[@]} \
    ${TRAINING[@]} \
    ${LAYOUT[@]} \
    ${DATA[@]} \
    ${REPORT[@]}

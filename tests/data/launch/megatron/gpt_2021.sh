#! /bin/bash
# Written for the tests after the flags of NVIDIA/Megatron-LM@00129014 megatron/arguments.py and the launch of its examples of 2021

GPUS=8
NNODES=${NNODES-4}
DISTRIBUTED_ARGS="--nproc_per_node $GPUS --nnodes $NNODES --node_rank ${RANK:=0} --master_addr localhost --master_port 6000"

python -m torch.distributed.launch $DISTRIBUTED_ARGS \
       pretrain_gpt.py \
       --tensor-model-parallel-size 8 \
       --pipeline-model-parallel-size 4 \
       --num-layers-per-virtual-pipeline-stage 2 \
       --num-layers 48 --hidden-size 6144 \
       --num-attention-heads 48 \
       --micro-batch-size 1 \
       --global-batch-size 64 \
       --seq-length 2048 \
       --max-position-embeddings 2048 \
       --train-iters 500000 \
       --data-path "$DATA" \
       --vocab-file gpt2-vocab.json \
       --merge-file gpt2-merges.txt \
       --data-impl mmap \
       --split 949,50,1 \
       --DDP-impl local \
       --lr 0.00015 \
       --lr-decay-style cosine \
       --activations-checkpoint-method uniform \
       --log-interval 10 \
       --fp16

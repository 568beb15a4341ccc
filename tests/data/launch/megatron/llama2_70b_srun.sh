#!/usr/bin/env bash
# Written for the tests after the flags of NVIDIA/Megatron-LM@157006d6 examples/gpt3 and examples/llama; one process per task, as
# srun starts them in NVIDIA's containers
#SBATCH -N 16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=h100:8
#SBATCH --exclusive

TP="${TP:-4}"
PP=4
LAYERS=$((80))
VIRTUAL=$(( LAYERS / PP / 4 ))

options="--num-layers ${LAYERS} --hidden-size 8192 --ffn-hidden-size 28672 \
  --num-attention-heads 64 --group-query-attention --num-query-groups 8 \
  --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --swiglu \
  --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \
  --attention-dropout 0 --hidden-dropout 0 \
  --tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER:-/data/llama2.model} --make-vocab-size-divisible-by 1 "
options+=" --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --context-parallel-size 2 --cp-comm-type p2p \
  --num-layers-per-virtual-pipeline-stage ${VIRTUAL} --sequence-parallel --tp-comm-overlap \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
options="$options --micro-batch-size 1 --global-batch-size 512 --train-iters 100 --lr 1e-4 --bf16 \
  --recompute-granularity full --recompute-method block --recompute-num-layers 2 \
  --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16 --grad-reduce-in-bf16"

case "${PROFILE:-no}" in
  yes) options+=" --profile" ;;
  *) ;;
esac

run_cmd="cd /workspace && python -u pretrain_gpt.py ${options}"
srun -l --container-image="nvcr.io/nvidia/pytorch:25.04-py3" --output="${LOG:-out}.log" sh -c "${run_cmd}"

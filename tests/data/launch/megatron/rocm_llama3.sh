#!/bin/bash
# Written for the tests after the flags and the form of ROCm/Megatron-LM@02b8aa76 examples/llama/train_llama3.sh
export NCCL_IB_HCA=${NCCL_IB_HCA:-$(rdma link -j | python3 -c "import sys, json; print(*[1, 2], sep=',')")}

for PAIR in "$@"
do
   NAME=$(echo $PAIR | cut -f1 -d=)
   LENGTH=${#NAME}
   export "$NAME"="${PAIR:$LENGTH+1}"
done

STAMP=$(date +"%Y-%m-%d_%H-%M-%S")
DRY="${DRY:-0}" # 1: only print
HERE=`pwd`
GPUS_PER_NODE=`python3 -c "import torch; print(torch.cuda.device_count())"`
NNODES="${NNODES:-1}"
ALL=$(($GPUS_PER_NODE*$NNODES))

if [ "${NNODES:-1}" -gt 1 ]; then
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-ens0}"
else
    echo "one node"
fi

SIZE="${SIZE:-70}"
TP="${TP:-8}"
MBS="${MBS:-2}"
BS="${BS:-8}"
SEQ="${SEQ:-2048}"
SEQ_PARALLEL="${SEQ_PARALLEL:-1}"
FP8="${FP8:-0}"
FSDP="${FSDP:-0}"
RECOMPUTE="${RECOMPUTE:-0}"
ROPE_FUSION="${ROPE_FUSION:-1}"

if [ "$FSDP" -eq 1 ]; then
    if [ "$TP" -gt 1 ]; then
        TP=1
        echo "TP=$TP"
    fi
fi

DATA_DIR="${DATA_DIR:-/root/.cache/data}"
TOKENIZER="${TOKENIZER:-"$DATA_DIR/tokenizer_llama3"}"
if ! [ -d "$TOKENIZER" ]; then
  TOKEN="${TOKEN:-none}"
  wget --header="Bearer $TOKEN" -O $TOKENIZER/tokenizer.json https://example.org/tokenizer.json
else
  echo "$TOKENIZER is there"
fi

if [[ $SIZE -eq 8 ]]; then # 8B
        HIDDEN=4096
        FFN=14336
        LAYERS=32
        HEADS=32
        KV=8
elif [[ $SIZE -eq 70 ]]; then
        HIDDEN=8192
        FFN=28672
        LAYERS=80
        HEADS=64
        KV=8
else
        echo "no such size"
        exit 1
fi
GROUP=$(( ${HEADS} / ${KV} ))
GROUPS_OF_HEADS=$(( ${HEADS} / ${GROUP} ))
LOG="runs/${NNODES}nodes_${SIZE}B/${STAMP}"

GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --num-layers $LAYERS \
    --hidden-size $HIDDEN \
    --ffn-hidden-size $FFN \
    --num-attention-heads $HEADS \
    --seq-length $SEQ \
    --max-position-embeddings 131072 \
    --untie-embeddings-and-output-weights \
    --position-embedding-type rope \
    --no-position-embedding \
    --swiglu \
    --disable-bias-linear \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --normalization RMSNorm \
    --micro-batch-size $MBS \
    --global-batch-size $BS \
    --train-iters 10 \
    --no-async-tensor-model-parallel-allreduce \
    --bf16 \
    --no-masked-softmax-fusion \
"
if [ "$RECOMPUTE" -eq 1 ]; then
    GPT_ARGS="$GPT_ARGS --recompute-num-layers $LAYERS \
        --recompute-granularity full \
        --recompute-method block \
        "
fi
if [ "$ROPE_FUSION" -eq 0 ]; then
    GPT_ARGS="$GPT_ARGS --no-rope-fusion"
fi
MORE="
    --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model ${TOKENIZER} \
    --group-query-attention \
    --num-query-groups $GROUPS_OF_HEADS \
    --no-gradient-accumulation-fusion \
    --overlap-grad-reduce \
    --tensorboard-dir $LOG \
    --mock-data \
    --lr 1e-4 \
    --eval-iters -1
"
if [ "$FSDP" -eq 1 ]; then
    MORE="$MORE --use-torch-fsdp2"
else
    MORE="$MORE --use-distributed-optimizer --overlap-param-gather"
fi
if [ "$SEQ_PARALLEL" -eq 1 ]; then
MORE="$MORE --sequence-parallel"
fi
if [ "$FP8" -eq 1 ]; then
MORE="$MORE --transformer-impl=transformer_engine \
    --fp8-margin=0 \
    --fp8-format=hybrid \
    --fp8-amax-history-len=1024 \
"
fi
LAUNCH="
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --master_addr ${MASTER_ADDR:-localhost} \
"
run_cmd="
    torchrun $LAUNCH pretrain_gpt.py \
        $GPT_ARGS \
        $MORE \
"
if [ "${TEE:-1}" -eq 0 ]; then
    run_cmd="$run_cmd >& $LOG"
else
    run_cmd="$run_cmd |& tee $LOG"
fi
if [ "$DRY" -eq 0 ]; then
    eval $run_cmd
fi

echo 'import sys
print("mean", sys.argv)' > mean.py
grep -Eo 'throughput per GPU [^|]*' $LOG | sed -E 's/.*\(TFLOP\/s\/GPU\): ([0-9\.]+).*/\1/' > tmp.txt
MEAN=$(python3 mean.py tmp.txt 2>/dev/null | awk '{printf "%.6f", $0}')
echo "tokens/GPU/s: $MEAN" |& tee -a $LOG

#!/bin/bash
# Written for the tests after the form of alibaba/Pai-Megatron-Patch@1a7758cb examples/llama3_1/run_mcore_llama3_1.sh: all that
# matters comes as words after the script's name; with the flags of NVIDIA/Megatron-LM alone
set -e
ENV=$1
HERE="$( cd "$( dirname "$0" )" && pwd )"
ROOT=$( dirname $( dirname ${HERE}))
export PYTHONPATH=${ROOT}:${PYTHONPATH}

if [ -z ${AC_LAYERS} ];then
    AC_LAYERS=1
fi
if [ $ENV = dsw ]; then
    PORT=$(shuf -n 1 -i 10000-65535)
    NNODES=1
    NODE_RANK=0
    GPUS_PER_NODE=8
elif [ $ENV = dlc ]; then
    NNODES=${WORLD_SIZE}
    NODE_RANK=${RANK}
    GPUS_PER_NODE=${KUBERNETES_CONTAINER_RESOURCE_GPU}
fi
LAUNCH="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_port $PORT"

SIZE=$2
MICRO=$3
GLOBAL=$4
SEQ=$5
PR=${6}
TP=${7}
PP=${8}
CP=${9}
SP=${10}
DO=${11}
AC=${12}
OUTPUT=${13}

if [ $SIZE = 8B ]; then
LAYERS=32
HIDDEN=4096
HEADS=32
FFN=14336
elif [ $SIZE = 70B ]; then
LAYERS=80
HIDDEN=8192
HEADS=64
FFN=28672
fi
gqa_options=" \
		    --group-query-attention \
		    --num-query-groups 8"

TP_COMM_OVERLAP=$(( ($TP > 1) ? 1 : 0 ))
if [ $TP_COMM_OVERLAP -eq 1 ]; then
    overlap_options="\
        --tp-comm-overlap \
        --overlap-grad-reduce \
        --overlap-param-gather"
fi

if [ $AC = full ]; then
    _check=$(( ($LAYERS / $PP) % ${AC_LAYERS} ))
    if [ $_check != 0 ]; then
        echo "layers of a stage must be a multiple of the recomputed ones"
        exit -1
    fi
    ac_options=" \
		    --recompute-method uniform \
            --recompute-num-layers ${AC_LAYERS} \
		    --recompute-granularity full"
elif [ $AC = sel ]; then
    ac_options=" \
        --recompute-activations"
fi

if [ $PR = bf16 ]; then
    pr_options=" \
        --bf16"
elif [ $PR = fp8 ]; then
    pr_options=" \
        --bf16 \
        --fp8-format hybrid \
        --fp8-amax-compute-algo max"
fi
if [ $DO = true ] && [ $PP != 0 ]; then
    do_options=" \
		    --use-distributed-optimizer"
fi
if [ $SP = true ] && [ $TP -gt 1 ]; then
    sp_options=" \
		    --sequence-parallel"
fi
STAMP=$(date "+%Y.%m.%d-%H.%M.%S")
NAME="${SIZE}-tp-${TP}-pp-${PP}_${STAMP}"
mkdir -p "${OUTPUT}/${NAME}"
find ${OUTPUT} -type f -name "*.json" -print0 | xargs -0 cp -t ${OUTPUT}/${NAME}

options="  \
        --save ${OUTPUT}/${NAME} \
        --lr 1e-4 \
        --attention-dropout 0.0 \
        --hidden-dropout 0.0 \
        --train-iters 100 \
        --micro-batch-size ${MICRO} \
        --global-batch-size ${GLOBAL} \
        --num-layers ${LAYERS} \
        --hidden-size ${HIDDEN} \
        --num-attention-heads ${HEADS} \
        --ffn-hidden-size ${FFN} \
        --seq-length ${SEQ} \
        --max-position-embeddings 131072 \
        --tensor-model-parallel-size ${TP} \
        --pipeline-model-parallel-size ${PP} \
        --context-parallel-size ${CP} \
        --vocab-size 128256 \
        --swiglu \
        --normalization RMSNorm \
        --norm-epsilon 1e-05 \
        --use-rotary-position-embeddings \
        --position-embedding-type rope \
        --untie-embeddings-and-output-weights \
        --disable-bias-linear \
        --rotary-base 500000 \
        "
run_cmd="torchrun $LAUNCH pretrain_llama.py
 ${options} ${pr_options} ${load_options} ${ac_options} \
 ${do_options} ${sp_options} ${gqa_options} ${overlap_options}"

echo ${run_cmd}
eval ${run_cmd}
set +x

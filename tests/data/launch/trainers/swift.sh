# A job for the tests, in ms-swift's arguments
NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-32B --tuner_type full --torch_dtype bfloat16 \
  --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --max_length 8192 --deepspeed zero3

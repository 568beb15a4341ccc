# A job for the tests, in the flags of Hugging Face's Trainer under accelerate
NODES=2
accelerate launch --num_machines $NODES --num_processes 16 train.py \
  --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \
  --max_seq_length 4096 --bf16 true --gradient_checkpointing --optim adamw_torch --output_dir out --fsdp "full_shard auto_wrap"

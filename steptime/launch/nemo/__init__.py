"""NeMo 1, NeMo 2.0 and Megatron-Bridge: their formats, translated to Megatron-Core's names."""

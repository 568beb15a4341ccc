"""NeMo 1, NeMo 2.0 and Megatron-Bridge: their formats, in the words of Megatron-Core."""

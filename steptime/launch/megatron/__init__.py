"""Megatron-LM and Megatron-Core: flags, dumps of arguments and config objects, read by one table into one plan."""

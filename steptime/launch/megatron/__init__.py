"""Megatron-LM and Megatron-Core: flags, dumps of arguments and config objects, translated by one table into a plan."""

"""The answer: step, tables, FLOPs, verdict, interval, scaling, fixes, whole run, assumptions."""

"""The torch microbenchmark: measures what the model assumes, and compares predicted with measured figures.

`3dtrn bench PLAN`, or `torchrun ... -m steptime.bench PLAN` on several ranks. Needs the extra `steptime[bench]` (torch,
psutil); nothing else in the package imports it, but for `trace*`: they read profiler traces and need neither.
"""

"""Level 3: predict the memory and time of a training step without running it.

Memory comes from running the step on fake tensors, which have no storage. Time comes from one such run and a table of
GPUs, layer by layer, in bf16 and in FP8.
"""

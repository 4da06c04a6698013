"""Level 3: what a training step will take, before it is run. Memory: found by running it on tensors without storage.
Time: predicted from one such run and a table of GPUs, linear by linear, in bf16 and in FP8.
"""

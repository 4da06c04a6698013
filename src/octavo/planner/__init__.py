"""Level 5: predict the memory and time of a training step without running it, and decide by them.

Memory comes from running the step on fake tensors, which have no storage. Time comes from one forward on such tensors
and a table of GPUs, layer by layer, in bf16 and in FP8. Read first:

    auto_convert.py     octavo.convert: decide, then convert
    model_plan.py       octavo.plan: decide by cost for a GPU, and predict time and memory of a step
    model_memory.py     octavo.inspect.memory: the memory of a step, by category
    devices.py          the table of GPUs
    roofline.py         time of a linear layer on a GPU
    timeline.py         every storage that a step makes, resizes and frees
"""

"""Level 5: predict the memory and time of a training step without running it, and decide by them.

Memory comes from running the step on fake tensors, which have no storage. Time comes from one forward on such tensors
and a table of GPUs, layer by layer, in bf16 and in FP8. The way of a prediction:

    model_plan.py       octavo.plan, octavo.inspect.memory: a module and its batch as a `Workload`
                        (octavo plan and octavo init: `octavo.train.run_plan`)
    decide.py           which layers compute in FP8, by the rules and by predicted cost; octavo.convert: auto_convert.py
    trace.py            one forward: calls of linear layers, and everything else
    timeline.py         one step: every storage that it makes, resizes and frees
    few_blocks.py       equal blocks: a few of them run, and stand for all
    step_memory.py      memory of a step of all blocks, on one GPU or as a share of it
    roofline.py         time of a linear layer on a GPU of devices.py
    step.py             time of a step: layers, collectives, the pipeline
    prediction.py       `Workload`: all of this for one step, and for the steps of a forecast
    forecast.py, memory_plan.py    what users get
"""

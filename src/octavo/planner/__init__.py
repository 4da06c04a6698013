"""Level 5: predict the memory and time of a training step without running it, and decide by them (docs/planner.md).

Time: `roofline` of a linear layer, `step` of a model, from a `trace` of one forward. Memory: `step_memory`, from a
timeline of a step on a few blocks. `prediction` joins them for `model_plan` and `octavo.train.run_plan`.
"""

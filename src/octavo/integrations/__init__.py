"""Level 7: Octavo inside other training tools. Nothing below imports this, and each file imports its own tool.

precision.py      what a user gives as `precision`, and the FP8 state of a model for a tool's checkpoints
transformers.py   Transformers' Trainer and its subclasses, such as TRL's SFTTrainer
accelerate.py     Hugging Face accelerate
lightning.py      Lightning's Trainer and Fabric
"""

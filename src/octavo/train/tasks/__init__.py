"""Tasks: what a run learns. A task is a class with data, model, loss and metrics; the trainer does the rest.

`Task` (`task.py`) is the interface, `task_of` (`registry.py`) finds the class of a configuration.
"""

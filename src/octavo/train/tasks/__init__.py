"""Tasks: what a run learns. A task is a class with data, model, loss and metrics; the trainer does the rest."""

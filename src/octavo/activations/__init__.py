"""Level 3: FP8 copies of what a model saves for backward, and recomputation of what need not be saved."""

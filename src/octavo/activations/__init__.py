"""Level 3: FP8 copies of what a model saves for backward, and recomputation of what need not be saved.

detect, formulas, verify    which modules compute a norm, a gated MLP or an activation function, read from their code
candidates                  which modules of a model can store activations in FP8, and why the others cannot
modules, functional         the classes such modules get, and their autograd functions
saved_tensors, exactness    hooks that compress what all other operations save, and the table of what stays exact
compiled                    the same under torch.compile, for norms, gated MLPs and activation functions
recompute                   outputs that are recomputed in backward from what their producer saved
"""

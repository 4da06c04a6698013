"""Level 5: a trained model in the FP8 layouts that inference engines read. Needs Transformers. Read first:

    layouts.py    the published layouts: names, scales and configuration
    weights.py    the FP8 values of a model, by their names in its checkpoint
    writer.py     octavo.export: write a model in one of the layouts
    card.py       the README.md of such a folder
    folder.py     folders that appear complete or not at all

`octavo export` of checkpoints (`octavo.train.checkpoint.export`) writes through these.
"""

from octavo.serving.card import Exported
from octavo.serving.writer import export

__all__ = ["Exported", "export"]

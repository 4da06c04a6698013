"""Level 5: a trained model in the FP8 layouts that inference engines read. Needs Transformers.

    layouts.py    the published layouts: names, scales and configuration
    writer.py     octavo.export: write a model in one of them
    card.py       the README.md of such a folder
    folder.py     folders that appear complete or not at all
"""

from octavo.serving.writer import Exported, export

__all__ = ["Exported", "export"]

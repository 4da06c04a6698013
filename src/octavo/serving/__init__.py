"""Level 5: a trained model in the FP8 layouts that inference engines read. Needs Transformers."""

from octavo.serving.folder import Exported
from octavo.serving.writer import export

__all__ = ["Exported", "export"]

"""Names of files in the output folder of a run, for readers that need no more of it."""

from octavo.train.checkpoint.retention import FOLDER
from octavo.train.record.metrics import METRICS_FILE, RESULT_FILE

CONFIG_FILE = "config.toml"
LAYERS_FILE = "layers.json"  # The rows of `octavo.report`, from an FP8 run only
RUN_MARKERS = (METRICS_FILE, RESULT_FILE, FOLDER, CONFIG_FILE)  # Files that identify the folder of a run

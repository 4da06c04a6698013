"""The class of each `data.task`."""

from octavo.train.config.run_config import TrainConfig
from octavo.train.tasks.images import ImageClassification, ImageGeneration, ImageTextTask
from octavo.train.tasks.language import Language
from octavo.train.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    "language": Language, "image-classification": ImageClassification, "image-text": ImageTextTask,
    "image-generation": ImageGeneration,
}  # fmt: skip


def task_of(config: TrainConfig) -> type[Task]:
    return TASKS[config.data.task]

"""The section `[sample]` of a run's configuration."""

from typing import Annotated

from pydantic import Field, Strict, field_validator

from octavo.train.config.sections import Count, Section


class SampleConfig(Section):
    """`[sample]`: text that the model writes now and then while it trains, to look at."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between two samples; 0 samples at the end only. The end is always sampled."""
    prompts: Annotated[tuple[str, ...], Strict(False), Field(min_length=1)]
    """Beginnings of texts to go on from, as ["def "]; "" begins a document."""
    tokens: Count = 64
    """Largest number of tokens to write for each prompt."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 takes the most likely token each time. Above 0, tokens are drawn with this temperature; the seed is a function
    of (`run.seed`, step)."""

    @field_validator("prompts", mode="before")
    @classmethod
    def _list_prompts(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

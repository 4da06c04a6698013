"""Generate text from prompts during training, in the precision it trains in (`[sample]`), without a trace in the run.

Each token takes a forward of all prompts and what was written so far, without a cache of keys and values, so nothing
could differ from training's forward. Every rank takes part in every forward, and rank 0 chooses the tokens.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.runtime.torch_compat import run_eagerly
from octavo.train.config.run_config import ConfigError
from octavo.train.evaluation import without_trace
from octavo.train.trainer import Trainer


class Sampler:
    def __init__(self, trainer: Trainer) -> None:
        config, tokenizer = trainer.config, trainer.task.data.tokenizer
        assert config.sample is not None
        self._trainer, self._settings, self._tokenizer = trainer, config.sample, tokenizer
        encoded = tokenizer.encode(list(config.sample.prompts))
        self._prompts: list[list[int]] = [ids or [tokenizer.end_id] for ids in encoded]
        longest, length = max(map(len, self._prompts)), config.data.sequence_length
        if longest + config.sample.tokens > length:
            problem = f"sample.tokens = {config.sample.tokens} after a prompt of {longest} tokens exceeds"
            limit = f"data.sequence_length = {length}, beyond which the model is not trained"
            raise ConfigError(f"{problem} {limit}: lower sample.tokens, or shorten the prompt")

    def is_due(self, step: int) -> bool:
        return bool(self._settings.every) and step % self._settings.every == 0

    def write(self) -> list[dict[str, str]]:
        """Go on from every prompt; on all ranks. Returns `{"prompt": …, "text": …}` for each."""
        trainer, tokens, end = self._trainer, self._settings.tokens, self._tokenizer.end_id
        seed = np.random.SeedSequence([trainer.config.run.seed, trainer.step]).generate_state(1, np.uint64)[0]
        generator = torch.Generator("cpu").manual_seed(int(seed))
        lengths = torch.tensor([len(prompt) for prompt in self._prompts], device="cpu")
        ids = torch.full((len(lengths), int(lengths.max()) + tokens), end, device="cpu")
        for row, prompt in enumerate(self._prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, device="cpu")
        ended = torch.zeros(len(lengths), dtype=torch.bool, device="cpu")
        rows = torch.arange(len(lengths), device="cpu")
        with without_trace(trainer.model), run_eagerly():  # each length would be another graph
            for number in range(tokens):
                trainer.between()
                last = lengths + number
                logits = trainer.logits(ids[:, : int(last.max())].to(trainer.ranks.device))[rows, last - 1]
                choice = trainer.ranks.run_on_rank0(partial(self._choose, logits, generator))
                chosen = torch.tensor(choice, device="cpu")
                ended |= chosen == end
                if ended.all():
                    break
                ids[rows, last] = torch.where(ended, end, chosen)
        return [self._sample(row, ids[row, len(prompt) :].tolist()) for row, prompt in enumerate(self._prompts)]

    def _choose(self, logits: Tensor, generator: torch.Generator) -> list[int]:
        logits = logits.double().cpu().nan_to_num()  # of a model that has diverged: any token will do
        if not self._settings.temperature:
            return logits.argmax(-1).tolist()
        # Below the largest one, so that no temperature makes an infinity of it.
        probabilities = ((logits - logits.amax(-1, keepdim=True)) / self._settings.temperature).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1).tolist()

    def _sample(self, row: int, written: list[int]) -> dict[str, str]:
        end = self._tokenizer.end_id
        written = written[: written.index(end)] if end in written else written
        before = self._tokenizer.decode(self._prompts[row])
        whole = self._tokenizer.decode(self._prompts[row] + written)  # a token alone may be a part of a character
        text = whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode(written)
        return {"prompt": self._settings.prompts[row], "text": text}

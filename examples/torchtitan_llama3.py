"""torchtitan's Llama 3 in FP8, as configs for its trainer (needs torchtitan, and GPUs to train):

    export PYTHONPATH=examples
    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_llama3 --config llama3_8b_fp8

Without a config of your own, the same from the command line:

    --override.imports 'octavo.integrations.torchtitan.fp8={"recipe": "rowwise", "skip_last": 1}'

`python examples/torchtitan_llama3.py` prints what is converted, on any machine.
"""

import torch
from torchtitan.models.llama3 import config_registry, model_registry
from torchtitan.trainer import Trainer

from octavo.integrations.torchtitan import Fp8Converter


def llama3_8b_fp8() -> Trainer.Config:
    """Return torchtitan's config of Llama 3 8B, with the linears of all blocks but the last in FP8."""
    config = config_registry.llama3_8b()
    config.model_spec = model_registry("8B", converters=[Fp8Converter.Config(recipe="rowwise", skip_last=1)])
    return config


if __name__ == "__main__":
    with torch.device("meta"):
        model = llama3_8b_fp8().model_spec.model.build()
    fp8 = [name for name, module in model.named_modules() if hasattr(module, "recipe")]
    print(f"{len(fp8)} linears in FP8, from {fp8[0]} to {fp8[-1]}")
    print(model.layers["0"].feed_forward)

"""Supervised fine-tuning with TRL in FP8, on a CPU in a minute: `python examples/sft_trl.py` (needs trl, accelerate).

With a model and a data set of the Hub, only the last lines change: SFTTrainer takes their names.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import octavo
from octavo.integrations.transformers import with_fp8

torch.manual_seed(0)
names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
words = {word: number for number, word in enumerate(["<pad>", "<eos>", "after", "comes", *names])}
tokens = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")
pairs = [(names[n % 10], names[(n + 1) % 10]) for n in range(160)]
data = Dataset.from_list([{"prompt": f"after {a} comes", "completion": f" {b}"} for a, b in pairs])

config = LlamaConfig(
    vocab_size=len(words), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    use_cache=False, tie_word_embeddings=False,
)  # fmt: skip
model = LlamaForCausalLM(config).bfloat16()
with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        output_dir=folder, max_steps=30, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=10,
        report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True, bf16=False,
    )  # fmt: skip
    trainer = with_fp8(SFTTrainer)(
        model=model, args=args, train_dataset=data, processing_class=tokenizer, precision="fp8+activations+optimizer"
    )
    trainer.train()
print(octavo.report(model).summary)
with torch.no_grad():
    prompt = tokenizer("after three comes", return_tensors="pt").input_ids.to(model.device)
    print("after three comes", tokenizer.decode(model(prompt).logits[0, -1].argmax()))

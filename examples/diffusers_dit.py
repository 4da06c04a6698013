"""A diffusion transformer of diffusers in FP8: `python examples/diffusers_dit.py` (needs diffusers).

Trains a small DiT to remove noise from the digits of scikit-learn, in bf16 and in FP8 from the same start.
"""

import torch
from diffusers import DiTTransformer2DModel
from torch import nn

import octavo

try:
    from sklearn.datasets import load_digits

    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 8 - 1  # 1797 images of 8 × 8 pixels
except ModuleNotFoundError:
    print("scikit-learn is not installed: random images")
    images = torch.rand(1797, 1, 8, 8, generator=torch.Generator().manual_seed(0)).round() * 2 - 1
    labels = images.flatten(1).sum(1).long() % 10

device = "cuda" if torch.cuda.is_available() else "cpu"
images, labels = images.to(device, torch.bfloat16), labels.to(device)


def train(fp8: bool, steps: int = 60) -> None:
    """Train by flow matching: the model sees image + noise, and predicts noise − image."""
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=64, in_channels=1, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=1000,
    ).to(device, torch.bfloat16)  # fmt: skip
    if fp8:
        octavo.convert(model, "rowwise", activations="fp8")
    optimizer = octavo.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, steps + 1):
        rows = torch.randint(1500, (32,))
        noise, time = torch.randn_like(images[rows]), torch.rand(32, 1, 1, 1, device=device).bfloat16()
        mixed = time * noise + (1 - time) * images[rows]
        output = model(mixed, timestep=(time.flatten() * 999).long(), class_labels=labels[rows]).sample
        loss = nn.functional.mse_loss(output.float(), (noise - images[rows]).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"{'FP8 ' if fp8 else 'bf16'}  step {step}  loss {loss.item():.3f}")


if __name__ == "__main__":
    train(fp8=False)
    train(fp8=True)

"""A vision transformer of timm in FP8: `python examples/timm_vit.py` (needs timm and torchvision).

Trains a small ViT on the digits of scikit-learn if it is installed, in bf16 and in FP8 from the same start.
"""

import timm
import torch
from torch import nn

import octavo

try:
    from sklearn.datasets import load_digits

    pixels, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    pixels = pixels.float() / 16  # 1797 images of 8 × 8 pixels
except ModuleNotFoundError:
    print("scikit-learn is not installed: random images, labeled by their brightest row")
    pixels = torch.rand(1797, 64, generator=torch.Generator().manual_seed(0))
    labels = pixels.view(-1, 8, 8).sum(2).argmax(1)

device = "cuda" if torch.cuda.is_available() else "cpu"
images = (2 * pixels.view(-1, 1, 8, 8) - 1).to(device, torch.bfloat16)
labels = labels.to(device)


def train(fp8: bool) -> None:
    """Train four epochs and print the accuracy on images that the model did not see."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=64, depth=2,
        num_heads=2, class_token=False, global_pool="avg",
    ).to(device, torch.bfloat16)  # fmt: skip
    if fp8:
        octavo.convert(model, "rowwise", activations="fp8")
        print(octavo.report(model))
    optimizer = octavo.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    for epoch in range(4):
        model.train()
        for batch in torch.randperm(1500).split(50):
            loss = nn.functional.cross_entropy(model(images[batch]).float(), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            correct = model(images[1500:]).argmax(1) == labels[1500:]
        name = "FP8 " if fp8 else "bf16"
        print(f"{name}  epoch {epoch + 1}  loss {loss.item():.3f}  accuracy {correct.float().mean():.1%}")


if __name__ == "__main__":
    train(fp8=False)
    train(fp8=True)

"""Your own loop with accelerate in FP8, saved and resumed: `python examples/accelerate_loop.py` (needs accelerate).

Trains on the digits of scikit-learn if it is installed.
"""

import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import octavo
from octavo.integrations.accelerate import Fp8Accelerator


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1797 images of 8 × 8 pixels and their labels; without scikit-learn, random images."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        print("scikit-learn is not installed: random images, labeled by their brightest row")
        images = torch.rand(1797, 64, generator=torch.Generator().manual_seed(0))
        return images, images.view(-1, 8, 8).sum(2).argmax(1)
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def main() -> None:
    """Train two epochs, save, resume in a new accelerator, train two more, and test."""
    torch.manual_seed(0)
    images, labels = digits()
    train = TensorDataset(images[:1500], labels[:1500])
    with tempfile.TemporaryDirectory() as folder:
        for part in range(2):
            accelerator = Fp8Accelerator(precision="fp8", mixed_precision="bf16")
            model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            loader = DataLoader(train, batch_size=50, shuffle=True)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # converts the model
            if part == 1:
                accelerator.load_state(folder)  # parameters, optimizer, recipes and their state
            for epoch in range(2):
                for x, y in loader:
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.print(f"epoch {2 * part + epoch + 1}  loss {loss.item():.3f}")
            accelerator.save_state(folder)
    accelerator.print(octavo.report(accelerator.unwrap_model(model)).summary)
    with torch.no_grad():
        correct = model(images[1500:].to(accelerator.device)).argmax(1).cpu() == labels[1500:]
    accelerator.print(f"accuracy on 297 images that it did not see: {correct.float().mean():.1%}")


if __name__ == "__main__":
    main()
